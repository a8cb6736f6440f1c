"""Folders of published models: what is read, what is refused, and what is said of a model."""

import contextlib
import dataclasses
import functools
import json
import math
import shlex
import shutil
from pathlib import Path

import forked
import jax
import numpy as np
import pytest
import safetensors.numpy
from published_models import GOLDEN, assert_logits, copied, opened
from tokenizers import Tokenizer, models, processors

import meliad_like
from meliad_like.config import read_changes
from meliad_like.conversion.published.family import to_tensors
from meliad_like.conversion.published.folder import config_of_published, described
from meliad_like.errors import UserError
from meliad_like.models.model import Model
from meliad_like.run.opening import config_for_training
from meliad_like.vocabularies.base import load_vocabulary
from meliad_like.vocabularies.sentencepiece import SentencePieceVocabularyConfig, train_sentencepiece


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("mamba2", {"new_switch": True}, "can't honour new_switch = True, which we don't know"),
        ("mamba2", {"model_type": "qwen3_5_moe"}, "'qwen3_5_moe' is not one of .*gpt2, .*qwen3_5, "),
        ("granite_hybrid", {"num_local_experts": 4}, "we have no mixtures of experts, and num_local_experts = 4"),
        ("granite_hybrid", {"layer_types": ["conv"] * 5}, "can't honour layer_types 'conv', only linear_attention"),
        ("granite_hybrid", {"layer_types": ["mamba"]}, "layer_types names 1 layers, and there are 5"),
        ("falcon_h1", {"rope_parameters": {"rope_type": "longrope"}}, "can't honour rope_type 'longrope'"),
        ("granite_hybrid", {"position_embedding_type": "rope", "partial_rotary_factor": 0.5}, "factor = 0.5, only 1"),
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


def test_what_a_folder_determines_cannot_be_changed():
    with pytest.raises(UserError, match=r"Mamba2.state_size = 8, but .* has 16"):
        opened("mamba2", **{"Mamba2.state_size": 8})
    with pytest.raises(UserError, match=r"DecoderConfig.norm_epsilon = 1e-06, but .* has 1e-05"):
        opened("mamba2", **{"DecoderConfig.norm_epsilon": 1e-6})
    assert opened("mamba2", **{"DecoderConfig.scan_layers": True}).model.config.scan_layers


@pytest.mark.parametrize("end", [None, -1, 101])
def test_without_an_end_of_documents_no_token_ends_a_text(tmp_path, end):
    """Not the last id of the table; an id beyond the table is none."""
    folder = copied("recurrent_gemma", tmp_path / "folder", {"eos_token_id": end})
    lm, expected = meliad_like.load(folder), np.load(GOLDEN / "recurrent_gemma" / "expected.npz")
    assert lm.vocabulary.end_tokens == ()
    if end == -1:
        assert lm.generate(expected["ids"][0], 20, temperature=0.0).tokens == expected["greedy"][0].tolist()
    with pytest.raises(UserError, match="no token ends this model's documents: name one by TokenIdsVocabularyConfig"):
        assert lm.vocabulary.end_of_document
    lm.vocabulary.save(tmp_path)
    assert load_vocabulary(tmp_path).fingerprint == lm.vocabulary.fingerprint
    named = meliad_like.load(folder, gin_params=["TokenIdsVocabularyConfig.end_token = 7"])
    assert named.vocabulary.end_of_document == 7


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_text_ends_at_any_of_several_tokens(tmp_path, name):
    """The file for generation counts more than the other."""
    with np.load(GOLDEN / "recurrent_gemma" / "expected.npz") as file:
        ids, greedy = file["ids"][0], file["greedy"][0].tolist()
    ends = [min(set(range(101)) - {*greedy}), greedy[5]]
    folder = copied("recurrent_gemma", tmp_path / "folder", {"eos_token_id": ends[0]})
    saved = json.loads((folder / "config.json").read_text()) | {"eos_token_id": ends}
    (folder / name).write_text(json.dumps(saved))
    lm = meliad_like.load(folder)
    assert lm.generate(ids, 20, temperature=0.0).tokens == greedy[: greedy.index(ends[1]) + 1]
    assert lm.generate(ids, 20, temperature=0.0, stop_at_end=False).tokens == greedy
    lm.vocabulary.save(tmp_path)
    assert load_vocabulary(tmp_path).end_tokens == lm.vocabulary.end_tokens == tuple(ends)
    assert (
        lm.vocabulary.fingerprint
        == opened("recurrent_gemma", **{"TokenIdsVocabularyConfig.end_token": ends[0]}).vocabulary.fingerprint
    )


def test_a_tokenizer_that_cannot_be_read_may_be_replaced(tmp_path):
    """By the way that its error names; the token before texts belongs to the tokenizer of the folder."""
    folder = copied("recurrent_gemma", tmp_path / "folder", {"vocab_size": 276})
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "a": 1}, unk_token="a"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    assert config_of_published(folder, read_changes((), ()))[0].vocabulary.begin_token == "<s>"
    for open_folder in meliad_like.load, functools.partial(config_for_training, changes=read_changes((), ())):
        way_out = "SentencePieceVocabularyConfig.model_file = 'tokenizer.model'"
        with pytest.raises(UserError, match=f"WordLevel .* {way_out}"):
            open_folder(folder)
    texts = ["the river of the night was long and the day was bright " * 50]
    (tmp_path / "tokenizer.model").write_bytes(train_sentencepiece(SentencePieceVocabularyConfig(size=276), texts))
    bindings = f"SentencePieceVocabularyConfig.model_file = {str(tmp_path / 'tokenizer.model')!r}"
    changes = read_changes((), ("RunConfig.vocabulary = 'sentencepiece'", bindings))
    vocabulary = config_for_training(folder, changes).vocabulary.make()
    assert vocabulary.kind == "sentencepiece" and vocabulary.decode(vocabulary.encode("the river")) == "the river"


@pytest.mark.thorough
def test_how_far_a_model_sees_and_the_size_of_its_state_are_said(tmp_path):
    lm = opened("qwen3_5", **{"DotProductAttention.span": 24})
    size = sum(x.nbytes for x in lm.read(range(50)).arrays.values())
    assert f" {size:,} bytes of state for each text; a token sees everything by its states, the last 24" in str(lm)
    assert str(lm).endswith("24 tokens by attention (DotProductAttention.span)>")
    assert str(opened("mamba2")).endswith("; a token sees everything by its states>")
    windows = meliad_like.load(GOLDEN.parent / "gpt2_tiny")
    assert sum(x.nbytes for x in windows.read(range(5)).arrays.values()) == windows.state_size > 1000
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
    model = described(json.loads((folder / "config.json").read_text()), "large")
    shapes = Model(model.config, model.vocabulary_size).abstract_params
    params = jax.tree.map(lambda x: np.full(x.shape, 0.5, np.float32), shapes)
    places = model.family.places(model.fields, model.config)
    safetensors.numpy.save_file(to_tensors(model.family, places, params), folder / "model.safetensors")
    sizes = {}
    for dtype in ("float32", "bfloat16"):
        done = forked.run("-c", PEAK, str(GOLDEN / "mamba2"), str(folder), dtype)
        peak, sizes[dtype] = map(int, done.stdout.split())
        assert sizes[dtype] < peak < 1.25 * sizes[dtype] + 32e6, (dtype, peak)
    assert sizes["bfloat16"] < 0.51 * sizes["float32"] and sizes["float32"] > 80e6
