"""Published models: tiny ones that transformers 5.24 wrote, read in every way, and written again.

`golden/published/` has for each family a folder as transformers writes it, and what transformers computes with it in
float64, rounded to float32: logits at some places of two documents, the last ones of a long one, those of the second
part of a document read as a document of its own, the loss, gradients, and a greedy continuation. `error` and
`gradient_error` are transformers' own errors in float32, relative to the largest logit and to the largest entry of the
gradient (`make_golden_gradient_errors.py`). All parameters are random, norms and biases too.
"""

import dataclasses
import json
import shutil

import forked
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from make_golden_hybrids import CONFIGS as HYBRIDS
from published_models import GOLDEN, PADDED, W, assert_logits, no_starts, opened, padded
from ways import assert_same, begin, decode, read

import meliad_like
from meliad_like.conversion.pretrained import convert_from_huggingface, convert_to_huggingface
from meliad_like.conversion.published.family import FAMILIES, Part, to_tensors
from meliad_like.conversion.published.folder import described
from meliad_like.errors import UserError
from meliad_like.library import LanguageModel
from meliad_like.optimization.optimizers import by_kind


@pytest.fixture(scope="module", params=sorted(path.name for path in GOLDEN.iterdir()))
def case(request):
    """A family's model, and the expected arrays."""
    with np.load(GOLDEN / request.param / "expected.npz") as file:
        return opened(request.param), dict(file), request.param


def test_names_say_what_the_parameters_are(case):
    model = case[0].model
    assert by_kind(str, None, model.abstract_params) == model.kinds


# The tests read 3 blocks of two lanes, so that they share their programs; the loss is that of all 9 blocks in one pass.
@pytest.mark.parametrize("blocks", [3, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (PADDED // W, 1))])
def test_segments(case, blocks):
    """Segments of several blocks, all, and one."""
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


def test_a_long_document(case):
    lm, expected, _ = case
    ids, carry, pieces = padded(expected["long_ids"]), begin(lm.model, lm.params, 2), []
    ids = np.pad(ids, [(0, 1), (0, -ids.shape[1] % (3 * W))])
    for piece in np.split(ids, ids.shape[1] // (3 * W), axis=1):
        logits, carry = read(lm.model, lm.params, piece, carry, no_starts(2, 3))
        pieces.append(logits[:1])
    assert_logits(np.concatenate(pieces, axis=1)[:, 300 - expected["long"].shape[1] : 300], expected, "long_")


@pytest.mark.parametrize("blocks", [3, pytest.param(PADDED // W, marks=pytest.mark.exhaustive)])
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


# Attention, and the two kinds of recurrence: carries of the other families are like these.
@pytest.mark.parametrize("name", ["qwen3_5", "recurrent_gemma"])
def test_a_batch_of_unequal_texts(name):
    lm, expected = opened(name), np.load(GOLDEN / name / "expected.npz")
    ids, at = expected["ids"], expected["at"]
    lengths = (70, 57, 2)
    outputs = lm.forward_batch([ids[i % 2, :length] for i, length in enumerate(lengths)])
    for lane, (length, one) in enumerate(zip(lengths, outputs)):
        known = at[at < length]
        wanted = expected["logits"][lane % 2, : len(known)]
        assert_logits(one.logits[known], {**expected, "logits": wanted}, "")


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
    model = described(json.loads((GOLDEN / name / "config.json").read_text()), name)
    places = model.family.places(model.fields, model.config)
    # The gradient of a tensor is that of our parameter times the factor.
    transposed = {
        path: [part._replace(factor=1 / part.factor, offset=0.0) for part in ([x] if isinstance(x, Part) else x)]
        for path, x in places.items()
    }
    ours = to_tensors(model.family, transposed, gradients)
    wanted = {key.partition("/")[2]: x for key, x in expected.items() if key.startswith("gradient/")}
    assert len(wanted) > 4
    for tensor, gradient in wanted.items():
        # OLMo-Hybrid's and Qwen3.5's gradients change by more if the last digits of the parameters do.
        tolerance = max(1e-4, expected[f"gradient_error/{tensor}"]) * np.abs(gradient).max()
        np.testing.assert_allclose(ours[tensor], gradient, rtol=0, atol=tolerance, err_msg=tensor)


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


def test_a_folder_in_bfloat16_and_back(case, tmp_path):
    """As models are published: the same tensors bit for bit, also where a constant was folded in (above 1e-4)."""
    *_, name = case
    shutil.copytree(GOLDEN / name, tmp_path / name)
    theirs = safetensors.numpy.load_file(GOLDEN / name / "model.safetensors")
    theirs = {key: x.astype(jnp.bfloat16) for key, x in theirs.items()}
    safetensors.numpy.save_file(theirs, tmp_path / name / "model.safetensors")
    convert_from_huggingface(tmp_path / name, (), (), tmp_path / "ours")
    convert_to_huggingface(tmp_path / "ours", tmp_path / "back", "bfloat16")
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    for key, x in safetensors.numpy.load_file(tmp_path / "back" / "model.safetensors").items():
        expected = theirs[key if key in theirs else key.replace("model.", "model.language_model.", 1)]
        assert x.dtype == expected.dtype
        np.testing.assert_array_equal(x, expected, err_msg=key)


@pytest.mark.thorough
def test_a_position_in_a_document_may_be_any_number():
    """Angles are those of distances: a million tokens later everything is the same."""
    lm, ids = opened("recurrent_gemma"), np.random.default_rng(0).integers(0, 101, (2, 3 * W)).astype(np.int32)
    module, carry = lm.model.bind(lm.params), begin(lm.model, lm.params, 2)
    for _ in range(2):
        _, carry = read(lm.model, lm.params, ids, carry, no_starts(2, 3))

    def later(leaf):
        return leaf + 3 * W * 50_000 if jnp.issubdtype(leaf.dtype, jnp.integer) else leaf

    assert int(carry.position[0]) == 6 * W
    far = jax.tree.map(later, carry)
    for one_way in (
        lambda carry: read(lm.model, lm.params, ids, carry, no_starts(2, 3))[0],
        lambda carry: decode(lm.model, lm.params, ids, module.begin_decoding(carry))[0],
    ):
        np.testing.assert_array_equal(one_way(far), one_way(carry))


@pytest.mark.thorough
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


CONTINUE = """
import sys
import numpy as np
from published_models import opened
lm = opened("recurrent_gemma")
np.save(sys.argv[2], lm.score(np.arange(50), lm.resume(sys.argv[1])).log_probabilities)
"""


@pytest.mark.thorough
def test_a_state_has_one_size_and_is_continued_in_another_process(tmp_path):
    lm, sizes = opened("recurrent_gemma"), []
    state = lm.begin()
    for length in (5, 1000):
        state = lm.read(np.random.default_rng(length).integers(0, 101, length), state)
        sizes.append({name: (x.shape, x.dtype) for name, x in state.arrays.items()})
    assert state.num_tokens == 1005 and sizes[0] == sizes[1]
    assert sum(x.nbytes for x in state.arrays.values()) == lm.state_size
    state.save(tmp_path / "state.npz")
    done = forked.run("-c", CONTINUE, *(str(tmp_path / name) for name in ("state.npz", "scores.npy")))
    assert done.returncode == 0, done.stderr
    here = lm.score(np.arange(50), state).log_probabilities
    np.testing.assert_array_equal(np.load(tmp_path / "scores.npy"), here)


@pytest.mark.thorough
def test_matrices_stay_in_bfloat16_for_reading():
    """Those of a file in bfloat16 lose nothing, nor do vectors of tokens that are multiplied by a factor."""
    folder = GOLDEN / "recurrent_gemma"
    lm, whole = meliad_like.load(folder, dtype="bfloat16"), meliad_like.load(folder)
    assert {str(x.dtype) for x in jax.tree.leaves(lm.params) if x.ndim > 1} == {"bfloat16"}
    rounded = jax.tree.map(lambda x: x.astype("bfloat16").astype("float32") if x.ndim > 1 else x, whole.params)
    same = LanguageModel(whole.opened._replace(params=rounded))
    ids = np.arange(40)
    np.testing.assert_allclose(lm.forward(ids).logits, same.forward(ids).logits, atol=2e-5, rtol=0)
    with pytest.raises(UserError, match="dtype='float16' is not one of float32, bfloat16"):
        meliad_like.load(folder, dtype="float16")


def test_every_family_has_arrays():
    tested = {json.loads((path / "config.json").read_text())["model_type"] for path in GOLDEN.iterdir()}
    # In test_golden_gpt2.py, test_golden_llama.py and test_golden_hybrids.py.
    tested |= {"gpt2", "llama", *HYBRIDS}
    assert {FAMILIES[kind] for kind in tested} == set(FAMILIES.values())
