"""Bamba, Nemotron-H, OLMo 3 and Gemma 3 against transformers: tiny random models (`make_golden_hybrids.py`)."""

import functools
import json

import jax
import numpy as np
import pytest
import safetensors.numpy
import ways
from decoders import mixer_of
from make_golden_hybrids import CONFIGS, PATH, outputs, parameter, tokens

import meliad_like
from meliad_like.conversion.published.folder import described, write_published
from meliad_like.errors import UserError
from meliad_like.layers.rotary import LinearScaling, RotaryScaling
from meliad_like.mixers.dot_product_attention import DotProductAttention, LocalAttention

TOKENS = tokens()


@functools.cache
def golden(kind):
    with np.load(PATH) as file:
        return {name.removeprefix(f"{kind}/"): file[name] for name in file if name.startswith(f"{kind}/")}


def tensors(kind):
    return {name: parameter(name, tuple(shape)) for name, shape in json.loads(str(golden(kind)["shapes"])).items()}


def load(kind, folder, changes):
    safetensors.numpy.save_file(tensors(kind), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(json.loads(str(golden(kind)["config"])) | changes))
    return meliad_like.load(folder, gin_params=["DecoderConfig.window_length = 4", "ReaderConfig.segment_length = 12"])


@pytest.mark.parametrize("kind", CONFIGS)
def test_in_segments_a_token_at_a_time_and_written_again(kind, tmp_path):
    lm, expected = load(kind, tmp_path, {}), golden(kind)["logits"]
    model, params, start = lm.model, lm.params, ways.starts(2, 3)
    first, carry = ways.read(model, params, TOKENS[:, :12], ways.begin(model, params, 2), start)
    second, _ = ways.read(model, params, TOKENS[:, 12:], carry, start)
    tokens, _ = ways.decode(model, params, TOKENS[:, 12:], model.bind(params).begin_decoding(carry))
    for rest in (second, tokens):
        logits = np.concatenate([first, rest], axis=1)
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
    (tmp_path / "back").mkdir()
    write_published(lm.opened, tmp_path / "back")
    back = safetensors.numpy.load_file(tmp_path / "back" / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, back, tensors(kind))


OLDER = {
    "nemotron_h": {"layers_block_type": None, "hybrid_override_pattern": "M-*-M", "num_hidden_layers": 5},
    "gemma3_text": {"layer_types": None, "_sliding_window_pattern": None, "sliding_window_pattern": 2}
    | {"rope_parameters": None, "rope_theta": 50.0, "rope_local_base_freq": 20.0}
    | {"rope_scaling": {"type": "linear", "factor": 2.0}},
}


@pytest.mark.parametrize("kind", OLDER)
def test_an_older_file_says_the_same(kind, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    old, new = load(kind, tmp_path / "old", OLDER[kind]), load(kind, tmp_path / "new", {})
    assert old.model.config.shape == new.model.config.shape


def test_nemotron_h_has_an_output_embedding_of_its_own_whatever_its_file_says(tmp_path):
    (tmp_path / "tied").mkdir()
    (tmp_path / "untied").mkdir()
    models = [
        load("nemotron_h", tmp_path / name, {"tie_word_embeddings": name == "tied"}) for name in ("tied", "untied")
    ]
    assert not models[0].model.config.tied_embedding
    jax.tree.map(np.testing.assert_array_equal, *(lm.params for lm in models))


def test_an_older_scaling_is_that_of_full_attention():
    saved = json.loads(str(golden("olmo3")["config"])) | {"rope_parameters": None, "rope_theta": 30.0}
    scaling = {"rope_type": "linear", "factor": 3.0}
    decoder = described(saved | {"rope_scaling": scaling}, "config.json").config
    full, window = (mixer_of(decoder, kind) for kind in (DotProductAttention, LocalAttention))
    assert (full.rotary_base, full.rotary_scaling) == (30.0, LinearScaling(3.0)) and full.span == 8192
    assert (window.rotary_base, window.rotary_scaling) == (30.0, RotaryScaling()) and window.span == 6


@pytest.mark.parametrize(
    "kind, changes, message",
    [
        ("nemotron_h", {"layers_block_type": ["moe"]}, "we can't honour layers of 'moe', only linear_attention"),
        ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "ME"}, "layers of 'moe'"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "can't honour mlp_hidden_act = 'silu', only 'relu2'"),
        (
            "olmo3",
            {"layer_types": ["linear_attention"] * 4},
            "'linear_attention', only sliding_attention, full_attention",
        ),
        ("bamba", {"attn_layer_indices": [0]}, "has no tensor model.layers.*"),
        ("bamba", {"mamba_d_head": 16}, "the width of Mamba-2, 48, must be 6 times mamba_d_head=16"),
    ],
)
def test_what_cannot_be_honoured_is_named(tmp_path, kind, changes, message):
    with pytest.raises(UserError, match=message):
        load(kind, tmp_path, changes)


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_arrays_are_those_of_transformers(kind):
    """Where transformers is installed."""
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    expected = golden(kind)
    found = outputs(kind)
    assert json.loads(str(found["shapes"])) == json.loads(str(expected["shapes"]))
    np.testing.assert_allclose(found["logits"], expected["logits"], atol=1e-5)
