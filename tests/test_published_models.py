"""Published models: tiny ones that transformers 5.24 wrote, read in every way, trained, and written again.

`golden/published/` has for each family a folder as transformers writes it, and what transformers computes with it in
float64, rounded to float32: logits at some places of two documents, the last ones of a long one, those of the second
part of a document read as a document of its own, the loss, gradients, and a greedy continuation. `error` is
transformers' own error in float32, relative to the largest logit. All parameters are random, norms and biases too.
"""

import contextlib
import dataclasses
import json
import math
import shlex
import shutil
from pathlib import Path

import forked
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tiny_run
from make_golden_hybrids import CONFIGS as HYBRIDS
from ways import assert_same, begin, decode, read

import meliad_like
from meliad_like.config import read_changes
from meliad_like.config.run import with_changes
from meliad_like.conversion.pretrained import convert_from_huggingface, convert_to_huggingface
from meliad_like.conversion.published.family import FAMILIES, Part, to_tensors
from meliad_like.conversion.published.folder import described, normal_form
from meliad_like.data.batch import empty_batch
from meliad_like.data.token_store import TokenStore
from meliad_like.data.vocabulary import ByteVocabulary, load_vocabulary
from meliad_like.errors import UserError
from meliad_like.library import LanguageModel
from meliad_like.mesh import MeshConfig, make_mesh
from meliad_like.models.model import Model
from meliad_like.optimization.optimizers import by_kind
from meliad_like.planning.description import describe
from meliad_like.run.opening import config_for_training
from meliad_like.training.program import make_program, num_trained

GOLDEN = Path(__file__).parent / "golden" / "published"
W = 8
"""The length of a block: shorter than spans of attention, and no multiple of all of them."""
PADDED = 72


def opened(name, **bindings):
    bindings = {"DecoderConfig.window_length": W, "ReaderConfig.segment_length": 3 * W} | bindings
    return meliad_like.load(GOLDEN / name, gin_params=[f"{key} = {value!r}" for key, value in bindings.items()])


@pytest.fixture(scope="module", params=sorted(path.name for path in GOLDEN.iterdir()))
def case(request):
    """A family's model, and the expected arrays."""
    with np.load(GOLDEN / request.param / "expected.npz") as file:
        return opened(request.param), dict(file), request.param


def padded(ids):
    return np.pad(ids, ((0, 0), (0, -ids.shape[1] % W))).astype(np.int32)


def assert_logits(logits, expected, name):
    """Errors of at most four times those of transformers."""
    error = 4 * expected[f"{name}error"] * expected[f"{name}scale"]
    wanted = {"": "logits", "long_": "long"}[name]
    np.testing.assert_allclose(logits, expected[wanted], rtol=0, atol=float(error))


def no_starts(b, blocks):
    return np.zeros((b, blocks), bool)


def test_names_say_what_the_parameters_are(case):
    model = case[0].model
    assert by_kind(str, None, model.abstract_params) == model.kinds


# The tests read 9 and 3 blocks of two lanes and decode 24 tokens or one, so that they share their programs.
@pytest.mark.parametrize("blocks", [PADDED // W, 3, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_segments(case, blocks):
    """One pass, and segments of several blocks and of one."""
    lm, expected, _ = case
    ids, carry, pieces = padded(expected["ids"]), begin(lm.model, lm.params, 2), []
    for piece in np.split(ids, PADDED // W // blocks, axis=1):
        logits, carry = read(lm.model, lm.params, piece, carry, no_starts(2, blocks))
        pieces.append(logits)
    assert_logits(np.concatenate(pieces, axis=1)[:, expected["at"]], expected, "")


def test_token_by_token_and_after_segments(case):
    lm, expected, _ = case
    ids, module = padded(expected["ids"]), lm.model.bind(lm.params)
    carry, pieces = begin(lm.model, lm.params, 2, decoding=True), []
    for piece in np.split(ids, 3, axis=1):
        logits, carry = decode(lm.model, lm.params, piece, carry)
        pieces.append(logits)
    assert_logits(np.concatenate(pieces, axis=1)[:, expected["at"]], expected, "")
    first, carry = read(lm.model, lm.params, ids[:, : 3 * W], begin(lm.model, lm.params, 2), no_starts(2, 3))
    then, carry = decode(lm.model, lm.params, ids[:, 3 * W : 6 * W], module.begin_decoding(carry))
    last, _ = read(lm.model, lm.params, ids[:, 6 * W :], module.end_decoding(carry), no_starts(2, 3))
    assert_logits(np.concatenate([first, then, last], axis=1)[:, expected["at"]], expected, "")


@pytest.mark.parametrize("blocks", [pytest.param(38, marks=pytest.mark.exhaustive), 2])
def test_a_long_document(case, blocks):
    lm, expected, _ = case
    ids, carry, pieces = padded(expected["long_ids"]), begin(lm.model, lm.params, 1), []
    for piece in np.split(ids, 38 // blocks, axis=1):
        logits, carry = read(lm.model, lm.params, piece, carry, no_starts(1, blocks))
        pieces.append(logits)
    assert_logits(np.concatenate(pieces, axis=1)[:, 300 - expected["long"].shape[1] : 300], expected, "long_")


@pytest.mark.parametrize("blocks", [PADDED // W, 3])
def test_a_second_document_in_the_lane_equals_it_alone(case, blocks):
    lm, expected, _ = case
    ids, carry, pieces = padded(expected["ids"]), begin(lm.model, lm.params, 2), []
    start = no_starts(2, PADDED // W)
    start[:, 48 // W] = True
    for piece, flags in zip(*(np.split(x, PADDED // W // blocks, axis=1) for x in (ids, start))):
        logits, carry = read(lm.model, lm.params, piece, carry, flags)
        pieces.append(logits)
    logits = np.concatenate(pieces, axis=1)
    assert_logits(logits[:, 48:70], expected | {"logits": expected["alone"]}, "")
    before = expected["at"] < 48
    assert_logits(logits[:, expected["at"][before]], expected | {"logits": expected["logits"][:, before]}, "")


def test_a_batch_of_unequal_texts(case):
    lm, expected, _ = case
    ids, at = expected["ids"], expected["at"]
    lengths = (70, 57, 2)
    outputs = lm.forward_batch([ids[i % 2, :length] for i, length in enumerate(lengths)])
    for lane, (length, one) in enumerate(zip(lengths, outputs)):
        known = at[at < length]
        wanted = expected["logits"][lane % 2, : len(known)]
        assert_logits(one.logits[known], expected | {"logits": wanted}, "")


def test_the_loss_and_its_gradients(case):
    lm, expected, name = case
    ids = padded(expected["ids"])

    def loss(params):
        module = lm.model.bind(params)
        targets, carry = np.roll(ids, -1, axis=1), module.init_carry(2)
        losses, _ = module.losses(ids, targets, carry, no_starts(2, PADDED // W), slice_length=PADDED)
        return jnp.mean(losses.nats[:, :69])

    value, gradients = jax.jit(jax.value_and_grad(loss))(lm.params)
    assert value == pytest.approx(float(expected["loss"]), rel=1e-5)
    family, saved = normal_form(json.loads((GOLDEN / name / "config.json").read_text()), name)
    _, places, _ = described(family, saved, name)
    # The gradient of a tensor is that of our parameter times the factor.
    transposed = {
        path: [part._replace(factor=1 / part.factor, offset=0.0) for part in ([x] if isinstance(x, Part) else x)]
        for path, x in places.items()
    }
    ours = to_tensors(family, transposed, gradients)
    wanted = {key.partition("/")[2]: x for key, x in expected.items() if key.startswith("gradient/")}
    assert len(wanted) > 4
    for tensor, gradient in wanted.items():
        np.testing.assert_allclose(ours[tensor], gradient, rtol=0, atol=1e-4 * np.abs(gradient).max(), err_msg=tensor)


def test_the_greedy_continuation(case):
    lm, expected, _ = case
    ids, carry = expected["ids"].astype(np.int32), begin(lm.model, lm.params, 2)
    for piece in np.split(ids[:, : 6 * W], 2, axis=1):
        _, carry = read(lm.model, lm.params, piece, carry, no_starts(2, 3))
    carry, written = lm.model.bind(lm.params).begin_decoding(carry), []
    for token in ids[:, 6 * W :].T:
        logits, carry = decode(lm.model, lm.params, token[:, None], carry)
    for _ in range(20):
        written.append(np.argmax(logits[:, -1], axis=-1).astype(np.int32))
        logits, carry = decode(lm.model, lm.params, written[-1][:, None], carry)
    np.testing.assert_array_equal(np.stack(written, axis=1), expected["greedy"])


def test_a_folder_and_back(case, tmp_path):
    """The same tensors: bit for bit, or where a constant was folded in to the last bit."""
    *_, name = case
    convert_from_huggingface(GOLDEN / name, (), (), tmp_path / "ours")
    convert_to_huggingface(tmp_path / "ours", tmp_path / "theirs")
    expected = safetensors.numpy.load_file(GOLDEN / name / "model.safetensors")
    expected = {
        key.replace("language_model.", ""): x
        for key, x in expected.items()
        if not key.startswith(("model.visual", "mtp"))
    }
    written = safetensors.numpy.load_file(tmp_path / "theirs" / "model.safetensors")
    assert written.keys() == expected.keys()
    for key, x in expected.items():
        np.testing.assert_allclose(written[key], x, rtol=2e-7, atol=1.2e-7, err_msg=key)
    config = json.loads((GOLDEN / name / "config.json").read_text())
    config = config.get("text_config", config) | {"dtype": "float32"}
    assert config.items() <= json.loads((tmp_path / "theirs" / "config.json").read_text()).items()
    ours, again = (meliad_like.load(tmp_path / folder) for folder in ("ours", "theirs"))
    assert dataclasses.replace(again.model.config, published="") == dataclasses.replace(ours.model.config, published="")
    assert_same(again.params, ours.params)


def copied(name, folder, changes):
    shutil.copytree(GOLDEN / name, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("mamba2", {"new_switch": True}, "can't honour new_switch = True, which we don't know"),
        ("mamba2", {"model_type": "qwen3_5_moe"}, "'qwen3_5_moe' is not one of gpt2, .*qwen3_5, "),
        ("granite_hybrid", {"num_local_experts": 4}, "we have no mixtures of experts, and num_local_experts = 4"),
        ("granite_hybrid", {"layer_types": ["conv"] * 5}, "can't honour layer_types 'conv', only linear_attention"),
        ("granite_hybrid", {"layer_types": ["mamba"]}, "layer_types names 1 layers, and there are 5"),
        ("falcon_h1", {"rope_parameters": {"rope_type": "longrope"}}, "can't honour rope_type 'longrope'"),
        ("falcon_h1", {"mlp_multipliers": [1.0]}, "mlp_multipliers has 1 numbers, and not 2"),
        ("olmo_hybrid", {"linear_num_value_heads": 3}, "linear_num_value_heads=3 must be a multiple"),
        ("qwen3_5", {"text_config": None}, "config.json has no text_config"),
        ("recurrent_gemma", {"block_types": ["window"]}, "can't honour block_types 'window', only recurrent"),
        ("mamba2", {"hidden_act": "gelu"}, "can't honour hidden_act = 'gelu', only 'silu' or 'swish'"),
        ("mamba2", {"num_heads": None}, "config.json has no num_heads"),
        ("mamba2", {"state_size": 0}, "state_size = 0 must be positive"),
        ("mamba2", {"state_size": 8}, "has .* rows, its config asks for|has shape"),
        ("mamba2", {"num_hidden_layers": 4}, "has a tensor backbone.layers.4.* no place for"),
        ("mamba2", {"num_hidden_layers": 6}, "has no tensor backbone.layers.5"),
        ("mamba2", {"tie_word_embeddings": False}, "has no tensor lm_head.weight"),
        ("mamba2", {"use_bias": True}, "has no tensor backbone.layers.0.mixer.*bias"),
    ],
)
def test_what_cannot_be_honoured_is_named(tmp_path, name, changes, message):
    folder = copied(name, tmp_path / "folder", changes)
    with pytest.raises(UserError, match=message):
        meliad_like.load(folder)


def test_a_tensor_with_one_row_more_is_refused(tmp_path):
    folder, name = copied("mamba2", tmp_path / "folder", {}), "backbone.layers.0.mixer.in_proj.weight"
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors[name] = np.append(tensors[name], tensors[name][:1], axis=0)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=rf"{name} has (\d+) rows, its config asks for \d+"):
        meliad_like.load(folder)


def test_an_output_embedding_that_is_not_tied_as_stated_is_refused(tmp_path):
    """Newer versions of transformers use it, older ones the embedding; equal ones are no difference."""
    folder = copied("mamba2", tmp_path / "folder", {})
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    for factor, refusal in (
        (1, contextlib.nullcontext()),
        (2, pytest.raises(UserError, match="lm_head.weight is not")),
    ):
        again = factor * tensors["backbone.embeddings.weight"]
        safetensors.numpy.save_file(tensors | {"lm_head.weight": again}, folder / "model.safetensors")
        with refusal:
            meliad_like.load(folder)


@pytest.mark.parametrize(
    "name, changes",
    [
        ("mamba2", {"time_step_limit": [0.0, math.inf]}),
        ("recurrent_gemma", {"block_types": None, "_block_types": ["recurrent", "recurrent", "attention"]}),
        ("recurrent_gemma", {"rope_parameters": None, "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}),
        ("granite_hybrid", {"layer_types": ["mamba", "mamba", "attention", "mamba", "mamba"]}),
        ("olmo_hybrid", {"rope_parameters": None, "rope_theta": None}),
        ("falcon_h1", {"rope_parameters": None, "rope_theta": 1e11, "rope_scaling": None, "mamba_use_mlp": True}),
    ],
)
def test_older_files_say_the_same(tmp_path, name, changes):
    old, new = (meliad_like.load(x) for x in (copied(name, tmp_path / "folder", changes), GOLDEN / name))
    assert dataclasses.replace(old.model.config, published="") == dataclasses.replace(new.model.config, published="")


def test_positions_that_are_not_stated_are_none(tmp_path):
    lm = meliad_like.load(copied("granite_hybrid", tmp_path / "folder", {"position_embedding_type": None}))
    assert lm.model.config.mixers[0].rotary_share == 0


def test_limits_of_steps_are_read(tmp_path):
    [mixer] = meliad_like.load(
        copied("mamba2", tmp_path / "folder", {"time_step_limit": [0.01, 0.1]})
    ).model.config.mixers
    assert (mixer.min_step, mixer.max_step) == (0.01, 0.1)


def test_stated_positions_do_not_limit_full_attention(tmp_path):
    """As in transformers."""
    lm = meliad_like.load(copied("olmo_hybrid", tmp_path / "folder", {"max_position_embeddings": 16}))
    with np.load(GOLDEN / "olmo_hybrid" / "expected.npz") as file:
        expected = dict(file)
    assert_logits(
        lm.forward(expected["ids"][0]).logits[expected["at"]], expected | {"logits": expected["logits"][0]}, ""
    )


def test_null_is_no_bound_of_the_logits(tmp_path):
    lm = meliad_like.load(copied("recurrent_gemma", tmp_path / "folder", {"logits_soft_cap": None}))
    assert lm.model.config.logit_bound is None


def test_the_whole_config_may_say_that_the_embedding_is_tied(tmp_path):
    """Where that of the language model doesn't."""
    text = json.loads((GOLDEN / "qwen3_5" / "config.json").read_text())["text_config"]
    del text["tie_word_embeddings"]
    assert meliad_like.load(copied("qwen3_5", tmp_path / "folder", {"text_config": text})).model.config.tied_embedding


def test_names_of_tensors_in_other_files(tmp_path):
    """An older name of the embedding, and convolutions and norms of OLMo as they are named in its code."""
    for name, renamed in (
        ("mamba2", {"backbone.embeddings.weight": "backbone.embedding.weight"}),
        (
            "olmo_hybrid",
            {
                "model.layers.0.attention_layer_norm.weight": "model.layers.0.input_layernorm.weight",
                "model.layers.0.feedforward_layer_norm.weight": "model.layers.0.post_attention_layernorm.weight",
                "model.layers.3.feedforward_layer_norm.weight": "model.layers.3.post_attention_layernorm.weight",
            },
        ),
    ):
        folder = copied(name, tmp_path / name, {})
        tensors = safetensors.numpy.load_file(folder / "model.safetensors")
        tensors = {renamed.get(key, key): x for key, x in tensors.items()}
        if name == "olmo_hybrid":
            names = [f"model.layers.0.linear_attn.{x}_conv1d.weight" for x in "qkv"]
            whole = np.concatenate([tensors[x] for x in names])
            tensors |= dict(zip(names, map(np.ascontiguousarray, np.split(whole, [24, 48]))))
        safetensors.numpy.save_file(tensors, folder / "model.safetensors")
        ours, theirs = meliad_like.load(folder), meliad_like.load(GOLDEN / name)
        jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)


@pytest.mark.thorough
def test_a_position_in_a_document_may_be_any_number():
    """Angles are those of distances: a million tokens later everything is the same."""
    lm, ids = opened("recurrent_gemma"), np.random.default_rng(0).integers(0, 101, (1, 6 * W)).astype(np.int32)
    module = lm.model.bind(lm.params)
    _, carry = read(lm.model, lm.params, ids, begin(lm.model, lm.params, 1), no_starts(1, 6))

    def later(leaf):
        return leaf + 3 * W * 50_000 if jnp.issubdtype(leaf.dtype, jnp.integer) else leaf

    assert int(carry.position[0]) == 6 * W
    far = jax.tree.map(later, carry)
    for one_way in (
        lambda carry: read(lm.model, lm.params, ids[:, : 3 * W], carry, no_starts(1, 3))[0],
        lambda carry: decode(lm.model, lm.params, ids[:, : 3 * W], module.begin_decoding(carry))[0],
    ):
        np.testing.assert_array_equal(one_way(far), one_way(carry))


def test_what_a_folder_determines_cannot_be_changed():
    with pytest.raises(UserError, match=r"Mamba2.state_size = 8, but .* has 16"):
        opened("mamba2", **{"Mamba2.state_size": 8})
    with pytest.raises(UserError, match=r"DecoderConfig.norm_epsilon = 1e-06, but .* has 1e-05"):
        opened("mamba2", **{"DecoderConfig.norm_epsilon": 1e-6})
    assert opened("mamba2", **{"DecoderConfig.scan_layers": True}).model.config.scan_layers


def test_a_model_without_a_tokenizer_reads_token_ids_alone(tmp_path):
    lm = opened("mamba2")
    with pytest.raises(UserError, match="has no tokenizer: give it token ids, not a text"):
        lm.score("a text")
    state = lm.read([1, 2, 3])
    continuation = lm.generate(state, 5, temperature=0.0)
    assert len(continuation.tokens) == 5 and continuation.text == ""
    # The end of a document is a token as any other, unless it stops the text.
    lm, expected = opened("recurrent_gemma"), np.load(GOLDEN / "recurrent_gemma" / "expected.npz")
    written = lm.generate_batch(list(expected["ids"]), 20, temperature=0.0, stop_at_end=False)
    assert [one.tokens for one in written] == expected["greedy"].tolist()
    lm = opened("mamba2")
    state.save(tmp_path / "state.npz")
    assert lm.generate(lm.resume(tmp_path / "state.npz"), 5, temperature=0.0).tokens == continuation.tokens


@pytest.mark.parametrize("end", [None, -1, 101])
def test_without_an_end_of_documents_no_token_ends_a_text(tmp_path, end):
    """Not the last id of the table; an id beyond the table is none."""
    folder = copied("recurrent_gemma", tmp_path / "folder", {"eos_token_id": end})
    lm, expected = meliad_like.load(folder), np.load(GOLDEN / "recurrent_gemma" / "expected.npz")
    assert lm.vocabulary.end_tokens == ()
    assert lm.generate(expected["ids"][0], 20, temperature=0.0).tokens == expected["greedy"][0].tolist()
    with pytest.raises(UserError, match="no token ends this model's documents: name one by TokenIdsVocabularyConfig"):
        assert lm.vocabulary.end_of_document
    lm.vocabulary.save(tmp_path)
    assert load_vocabulary(tmp_path).fingerprint == lm.vocabulary.fingerprint
    named = meliad_like.load(folder, gin_params=["TokenIdsVocabularyConfig.end_token = 7"])
    assert named.vocabulary.end_of_document == 7


CONTINUE = """
import sys
import numpy as np
from test_published_models import opened
lm = opened("recurrent_gemma")
np.save(sys.argv[2], lm.score(np.arange(50), lm.resume(sys.argv[1])).log_probabilities)
"""


def test_a_state_has_one_size_and_is_continued_in_another_process(tmp_path):
    lm, sizes = opened("recurrent_gemma"), []
    state = lm.begin()
    for length in (5, 1000):
        state = lm.read(np.random.default_rng(length).integers(0, 101, length), state)
        sizes.append({name: (x.shape, x.dtype) for name, x in state.arrays.items()})
    assert state.num_tokens == 1005 and sizes[0] == sizes[1]
    assert sum(x.nbytes for x in state.arrays.values()) == lm.model.carry_size
    state.save(tmp_path / "state.npz")
    done = forked.run("-c", CONTINUE, *(str(tmp_path / name) for name in ("state.npz", "scores.npy")))
    assert done.returncode == 0, done.stderr
    here = lm.score(np.arange(50), state).log_probabilities
    np.testing.assert_array_equal(np.load(tmp_path / "scores.npy"), here)


@pytest.fixture(scope="module")
def of_bytes(tmp_path_factory):
    """A published model whose tokens are bytes, as a folder that has our vocabulary, and bindings of documents."""
    folder = tmp_path_factory.mktemp("bytes") / "model"
    bindings = tiny_run.make_bindings(folder.parent)
    ByteVocabulary(8).save(copied("recurrent_gemma", folder, {"vocab_size": 264}))
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    table = np.random.default_rng(0).normal(0, 0.3, (264, 32)).astype(np.float32)
    safetensors.numpy.save_file(tensors | {"model.embed_tokens.weight": table}, folder / "model.safetensors")
    others = [binding for binding in bindings if not binding.startswith(("DecoderConfig", "RECURRENT", "Vocabulary"))]
    more = (
        "DecoderConfig.window_length = 8",
        "DecoderConfig.scan_layers = True",
        "ReaderConfig.segment_length = 24",
        "ReaderConfig.tokens_per_step = 192",
    )
    steps = "TrainingConfig.num_steps = 4", "TrainingConfig.checkpoint_every = 2", "MeshConfig.data = 1"
    return folder, [*others, *more, *steps]


@pytest.mark.parametrize("name", ["qwen3_5", "recurrent_gemma"])
def test_matrices_stay_in_bfloat16_for_reading(name):
    """Those of a file in bfloat16 lose nothing, nor do vectors of tokens that are multiplied by a factor."""
    lm, whole = meliad_like.load(GOLDEN / name, dtype="bfloat16"), meliad_like.load(GOLDEN / name)
    assert {str(x.dtype) for x in jax.tree.leaves(lm.params) if x.ndim > 1} == {"bfloat16"}
    rounded = jax.tree.map(lambda x: x.astype("bfloat16").astype("float32") if x.ndim > 1 else x, whole.params)
    same = LanguageModel(whole.opened._replace(params=rounded))
    ids = np.arange(40)
    np.testing.assert_allclose(lm.forward(ids).logits, same.forward(ids).logits, atol=2e-5, rtol=0)
    with pytest.raises(UserError, match="dtype='float16' is not one of float32, bfloat16"):
        meliad_like.load(GOLDEN / "qwen3_5", dtype="float16")


def test_how_far_a_model_sees_and_the_size_of_its_state_are_said(tmp_path):
    lm = opened("qwen3_5", **{"DotProductAttention.span": 24})
    size = sum(x.nbytes for x in lm.read(range(50)).arrays.values())
    assert f" {size:,} bytes of state for each text; a token sees everything by its states, the last 24" in str(lm)
    assert str(lm).endswith("24 tokens by attention (DotProductAttention.span)>")
    assert str(opened("mamba2")).endswith("; a token sees everything by its states>")
    # Without the parameters.
    shutil.copy(GOLDEN / "mamba2" / "config.json", tmp_path)
    described = forked.run("-m", "meliad_like.describe", "--noconfig", f"--load_dir={tmp_path}")
    assert "everything by its states" in described.stdout and "43,736" in described.stdout
    assert "with a vocabulary of 112 tokens" in described.stdout
    with pytest.raises(UserError, match="has neither model.safetensors nor model.safetensors.index.json: save"):
        meliad_like.load(tmp_path)


def test_the_command_that_makes_a_missing_store_names_the_model(tmp_path):
    folder = f"--load_dir={GOLDEN / 'mamba2'}"
    store = f"--gin_param=ReaderConfig.store='{tmp_path / 'none'}'"
    done = forked.run("-m", "meliad_like.train", folder, "--gin_file=task/my_files.gin", store, f"--workdir={tmp_path}")
    command = f"python -m meliad_like.prepare {shlex.quote(folder)} --gin_file=task/my_files.gin"
    assert f"make it with {command}" in done.stderr


def test_the_first_loss_of_a_training_is_that_of_transformers():
    lm, expected = opened("recurrent_gemma"), np.load(GOLDEN / "recurrent_gemma" / "expected.npz")
    ids, mask = padded(expected["ids"]), np.tile(np.arange(PADDED) < 69, (2, 1))
    bindings = f"DecoderConfig.window_length = {W}", f"ReaderConfig.segment_length = {PADDED}"
    run = config_for_training(GOLDEN / "recurrent_gemma", read_changes((), bindings))
    run = with_changes(run, {"data.tokens_per_step": 2 * PADDED})
    program = make_program(run, 101, make_mesh(MeshConfig(), jax.devices()[:1]))
    state = program.initialise().starting_with(lm.params)
    batch = empty_batch(2, PADDED, W)._replace(inputs=ids, targets=np.roll(ids, -1, axis=1), loss_mask=mask)
    _, metrics = program.compile_step()(state, batch)
    assert float(metrics.loss) == pytest.approx(float(expected["loss"]), rel=1e-5)


def test_documents_are_evaluated_with_a_folder(of_bytes, tmp_path):
    """In bfloat16 and from a store, which is made first."""
    folder, bindings = of_bytes
    source = [x for x in bindings if x.startswith(("RunConfig.source", "FolderSource"))]
    source += "DecoderConfig.window_length = 8", "ReaderConfig.segment_length = 24"
    flags = {"checkpoint": folder, "store": tmp_path / "store", "output": tmp_path / "results.json"}
    flags |= {"split": "validation", "dtype": "bfloat16"}
    words = [*(f"--{name}={value}" for name, value in flags.items()), *(f"--gin_param={x}" for x in source)]
    done = forked.run("-m", "meliad_like.evaluate", "--prepare", *words, environment=tiny_run.environment(1))
    assert done.returncode == 0, done.stderr
    lm, split = meliad_like.load(folder, dtype="bfloat16"), TokenStore(tmp_path / "store").split("validation")
    documents = [split.tokens(i, 0, int(length)) for i, length in enumerate(split.lengths)]
    nats = -sum(lm.score(tokens).log_probability for tokens in documents)
    figures = json.loads((tmp_path / "results.json").read_text())["figures"]
    expected = nats / math.log(2) / sum(len(tokens) - 1 for tokens in documents)
    assert figures["bits_per_token"] == pytest.approx(expected, rel=1e-4)


MIXERS_ALONE = "OptimizerConfig.trained = ('layers/*/mixers/*',)"


def is_mixers(path):
    return "'mixers'" in jax.tree_util.keystr(path)


def test_some_parameters_are_trained_on_four_devices_as_on_one(of_bytes):
    """Attention and recurrence; the others keep every bit, and have no optimizer state."""
    folder, bindings = of_bytes
    adam = "RunConfig.optimizer = 'adamw'", "ScheduleConfig.warmup_steps = 0", "OptimizerConfig.base_rate = 0.01"
    bindings = [x for x in bindings if not x.startswith(("Adafactor", "ScheduleConfig"))]
    changes = read_changes((), [*bindings, *adam, MIXERS_ALONE])
    run, lm = config_for_training(folder, changes), meliad_like.load(folder)
    start = jax.tree.map(np.asarray, lm.params)
    results = []
    for mesh in (MeshConfig(data=1), MeshConfig(data=1, fsdp=2, tensor=2)):
        setup = tiny_run.set_up(dataclasses.replace(run, mesh=mesh))
        step, state = setup.program.compile_step(), setup.program.initialise()
        params = jax.tree.map(lambda new, old: jax.device_put(new, old.sharding), start, state.params)
        state = state.starting_with(params)
        for i in range(2):
            state, metrics = step(state, setup.reader.batch(i, range(8)))
        results.append((metrics.loss, state.params))
    for (path, before), after in zip(jax.tree.leaves_with_path(start), jax.tree.leaves(results[1][1])):
        if not is_mixers(path):
            tiny_run.assert_same_bits(after, before)
        elif path[-1] != jax.tree_util.DictKey("decay"):  # Hardly any gradient.
            assert not np.array_equal(after, before), path
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    mixers = [x.size for path, x in jax.tree.leaves_with_path(start) if is_mixers(path)]
    moments = [x for x in jax.tree.leaves(state.optimizer_state) if x.ndim]
    assert sum(x.size for x in moments) == 2 * sum(mixers) > 0
    assert num_trained(run, lm.model) == sum(mixers)
    assert dict(describe(run, 264).table().rows)["trained parameters"] == f"{sum(mixers):,}"


@pytest.mark.thorough
def test_training_starts_with_a_folder_and_resumes(of_bytes, tmp_path, capsys):
    folder, bindings = of_bytes
    run = config_for_training(folder, read_changes((), [*bindings, MIXERS_ALONE]))
    assert run.model.published and run.model.window_length == 8
    assert tiny_run.train(run, tmp_path / "straight", str(folder)) == 0
    lm = meliad_like.load(folder, gin_params=["DecoderConfig.window_length = 8", "ReaderConfig.segment_length = 24"])
    batch = tiny_run.set_up(run).reader.batch(0, range(8))
    losses, _ = jax.jit(lambda *inputs: lm.model.bind(lm.params).losses(*inputs, slice_length=24))(
        batch.inputs, batch.targets, begin(lm.model, lm.params, 8), batch.start
    )
    expected = float(jnp.sum(losses.nats * batch.loss_mask) / jnp.sum(batch.loss_mask))
    first, *_ = tiny_run.read_metrics(tmp_path / "straight", "train")
    assert first["loss"] == pytest.approx(expected, rel=1e-5)
    # As a kill would have left it.
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "4")
    assert tiny_run.train(run, tmp_path / "resumed", str(folder)) == 0
    ours, again = (meliad_like.load(tmp_path / name) for name in ("straight", "resumed"))
    tiny_run.assert_same_bits(ours.params, again.params)
    assert f"{num_trained(run, ours.model):,} of them trained, from step 2 to 4" in capsys.readouterr().out
    for (path, before), after in zip(jax.tree.leaves_with_path(lm.params), jax.tree.leaves(again.params)):
        assert is_mixers(path) or np.array_equal(after, before), path
    convert_to_huggingface(str(tmp_path / "resumed"), str(tmp_path / "theirs"))
    back = meliad_like.load(tmp_path / "theirs")
    text = "a rose is when bees do not"
    assert back.score(text).bits_per_byte == pytest.approx(again.score(text).bits_per_byte, abs=1e-4)


def test_every_family_has_arrays():
    tested = {json.loads((path / "config.json").read_text())["model_type"] for path in GOLDEN.iterdir()}
    # In test_golden_llama.py and test_golden_hybrids.py.
    tested |= {"llama", *HYBRIDS}
    assert {FAMILIES[kind] for kind in tested} == set(FAMILIES.values())


PEAK = """
import ctypes, gc, sys
ctypes.CDLL(None).mallopt(-3, 1 << 16)  # Freed arrays are given back at once.
import jax
import meliad_like
from meliad_like.library import load

def resident(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))

tiny, large, dtype = sys.argv[1:]
load(tiny, dtype=dtype)  # What is imported and compiled for the first model.
gc.collect()
before = resident("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # The peak begins anew.
lm = load(large, dtype=dtype)
print(resident("VmHWM") - before, sum(x.nbytes for x in jax.tree.leaves(lm.params)))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's count of resident memory")
def test_the_memory_of_opening(tmp_path):
    """The parameters in the dtype that is asked for, and about a quarter; measured with 22 million."""
    folder = copied("mamba2", tmp_path / "large", {"hidden_size": 768, "num_heads": 192, "vocab_size": 4096})
    family, saved = normal_form(json.loads((folder / "config.json").read_text()), "large")
    decoder, places, size = described(family, saved, "large")
    params = jax.tree.map(lambda x: np.full(x.shape, 0.5, np.float32), Model(decoder, size).abstract_params)
    safetensors.numpy.save_file(to_tensors(family, places, params), folder / "model.safetensors")
    sizes = {}
    for dtype in ("float32", "bfloat16"):
        done = forked.run("-c", PEAK, str(GOLDEN / "mamba2"), str(folder), dtype)
        peak, sizes[dtype] = map(int, done.stdout.split())
        assert sizes[dtype] < peak < 1.25 * sizes[dtype] + 32e6, (dtype, peak)
    assert sizes["bfloat16"] < 0.51 * sizes["float32"] and sizes["float32"] > 80e6
