"""Pretrained models from files, written back, and what is refused."""

import dataclasses
import json
import re
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy
from numpy_pretrained import NumpyLlama, window
from pretrained_models import FOLDER, LLAMA_CONFIG, Pretrained, read, read_published, tensors, write_windows

from meliad_like.errors import UserError
from meliad_like.families.pretrained.recurrence import WindowSummary
from meliad_like.layers.rotary import DynamicScaling, LinearScaling, Llama3Scaling, YarnScaling
from meliad_like.models.model import Model
from meliad_like.run.opening import open_checkpoint, saved_config

TOKENS = np.random.default_rng(0).integers(0, 50, (2, 20)).astype(np.int32)


def random_llama(**changes):
    config = dataclasses.replace(LLAMA_CONFIG, **changes)
    params = Model(config, 50).init(jax.random.key(0))
    # Larger than they begin, so that everything counts.
    noise = np.random.default_rng(1)
    params = jax.tree.map(lambda x: 5 * x + noise.normal(0, 0.1, x.shape).astype(np.float32), params)
    return Pretrained(config, 50, params)


def logits(pretrained):
    return read(Model(pretrained.config, pretrained.vocabulary_size), pretrained.params, TOKENS, 0)[2]


def assert_same(actual, expected):
    assert (actual.config, actual.vocabulary_size) == (expected.config, expected.vocabulary_size)
    jax.tree.map(np.testing.assert_array_equal, actual.params, expected.params)


@pytest.mark.parametrize("tied", [True, False])
def test_llama_equals_numpy(tied):
    pretrained = random_llama(tied_embedding=tied)
    second = NumpyLlama(tensors(pretrained.config, pretrained.params), pretrained.config)
    expected = [window(second, tokens)[0] for tokens in TOKENS]
    np.testing.assert_allclose(logits(pretrained), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"tied_embedding": True},
        {"tied_embedding": False},
        {"rotary_scaling": LinearScaling(2.0)},
        {"rotary_scaling": DynamicScaling(2.0)},
        {"rotary_scaling": Llama3Scaling(2.0, 16)},
        {"rotary_scaling": YarnScaling(2.0, 16, whole_limits=False, scale=1.5), "sliding_window": 7},
    ],
)
def test_a_llama_folder_and_back(tmp_path, changes):
    pretrained = random_llama(**changes)
    write_windows(pretrained, 3, tmp_path)
    assert_same(read_published(tmp_path), pretrained)
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == 3


def test_a_gpt2_folder_and_back(tmp_path):
    write_windows(read_published(FOLDER), 96, tmp_path)
    theirs, ours = (safetensors.numpy.load_file(folder / "model.safetensors") for folder in (FOLDER, tmp_path))
    assert theirs.keys() == ours.keys()
    for name in theirs:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
    saved = json.loads((FOLDER / "config.json").read_text())
    written = json.loads((tmp_path / "config.json").read_text())
    written["n_inner"] = None  # four times the width: the same
    assert {key: saved[key] for key in written} == written


@pytest.mark.parametrize("read_ours", [open_checkpoint, saved_config])
def test_what_reads_our_checkpoints_alone_says_how_to_make_one(read_ours):
    made = f"python -m meliad_like.convert huggingface --input={FOLDER} --output=DIR/checkpoints makes one"
    with pytest.raises(UserError, match=re.escape(f"{FOLDER} is no checkpoint folder: {made}")):
        read_ours(FOLDER)


def test_several_files_of_bfloat16_and_older_names(tmp_path):
    shutil.copy(FOLDER / "config.json", tmp_path)
    tensors = {
        name.removeprefix("transformer."): value.astype(ml_dtypes.bfloat16)
        for name, value in safetensors.numpy.load_file(FOLDER / "model.safetensors").items()
    }
    tensors["h.0.attn.bias"] = np.ones((1, 1, 64, 64), ml_dtypes.bfloat16)
    weight_map = {name: f"model-{1 + i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in set(weight_map.values()):
        part = {name: value for name, value in tensors.items() if weight_map[name] == file}
        safetensors.numpy.save_file(part, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    whole = read_published(FOLDER)
    rounded = jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32), whole.params)
    assert_same(read_published(tmp_path), whole._replace(params=rounded))

    index.write_text(json.dumps({"weight_map": weight_map | {"new": "model-1.safetensors"}}))
    with pytest.raises(UserError, match="has a tensor transformer.new that the model of its config has no place for"):
        read_published(tmp_path)
    index.write_text(json.dumps({"weight_map": weight_map}))
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(UserError, match="cannot read .*model-2.safetensors"):
        read_published(tmp_path)


def test_damaged_safetensors_are_refused(tmp_path):
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    for size in (4, 100, len(whole) - 8):
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match="model.safetensors is damaged, or no safetensors file: "):
            read_published(tmp_path)
    tensors = safetensors.numpy.load(whole)
    for name, value, message in [
        ("transformer.extra", np.zeros(3), "has a tensor transformer.extra that the model .* has no place for"),
        ("transformer.wpe.weight", np.zeros((65, 32)), r"transformer.wpe.weight has shape \(65, 32\), .* \(64, 32\)"),
        ("transformer.h.0.attn.c_attn.weight", np.zeros((32, 95)), "c_attn.weight has 95 rows, its config"),
        ("transformer.ln_f.bias", np.zeros(32, np.int32), "ln_f.bias is I32, and not F32, F16 or BF16"),
    ]:
        value = value if value.dtype == np.int32 else value.astype(np.float32)
        safetensors.numpy.save_file(tensors | {name: value}, path)
        with pytest.raises(UserError, match=message):
            read_published(tmp_path)
    safetensors.numpy.save_file({k: v for k, v in tensors.items() if "h.1.ln_2.bias" not in k}, path)
    with pytest.raises(UserError, match="has no tensor transformer.h.1.ln_2.bias"):
        read_published(tmp_path)
    path.unlink()
    with pytest.raises(UserError, match="has neither model.safetensors nor .*save_pretrained"):
        read_published(tmp_path)


def test_numbers_of_8_bits_are_refused(tmp_path):
    """Of which numpy has none."""
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    name = "transformer.wte.weight"
    header[name] |= {"dtype": "F8_E4M3", "shape": [4, *header[name]["shape"]]}
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + whole[8 + size :])
    with pytest.raises(UserError, match="tensor transformer.wte.weight is F8_E4M3, and not F32, F16 or BF16"):
        read_published(tmp_path)


SUMMARY = WindowSummary(layers=(0, -1), num_inserted=2, pooling="attention", width=5)


def test_a_recurrence_comes_back(tmp_path):
    pretrained = random_llama(
        recurrence=(dataclasses.replace(SUMMARY, normalise_pooled=True),), window_length=16, overlap=3
    )
    write_windows(pretrained, 3, tmp_path)
    assert_same(read_published(tmp_path), pretrained)
    # safetensors itself makes files that only their owner can read.
    modes = {path.name: path.stat().st_mode for path in tmp_path.iterdir()}
    assert len(modes) == 3 and len(set(modes.values())) == 1


def test_a_recurrence_that_is_not_what_it_says_is_refused(tmp_path):
    pretrained = random_llama(recurrence=(SUMMARY,))
    write_windows(pretrained, 3, tmp_path)
    path = tmp_path / "recurrence.safetensors"
    tensors = safetensors.numpy.load_file(path)
    with safetensors.safe_open(path, framework="numpy") as file:
        saved = json.loads(file.metadata()["WindowSummary"])

    def refused(message, tensors=tensors, **changes):
        safetensors.numpy.save_file(tensors, path, metadata={"WindowSummary": json.dumps(saved | changes)})
        with pytest.raises(UserError, match=message):
            read_published(tmp_path)

    refused("WindowSummary.layers=.* names a layer that 2 layers lack", layers=[7])
    refused("recurrence.safetensors: pooling='most' must be 'mean' or", pooling="most")
    refused(r"layers/\d/\w+ has shape \(5,.*\), its config asks for \(6,", width=6)
    fewer = {name: value for name, value in tensors.items() if name != "layer_scores"}
    refused("has no tensor layer_scores: it is not the model", fewer)
    refused("has a tensor more that the model .* has no place for", tensors | {"more": np.zeros(1, np.float32)})
    refused("doesn't say what recurrence it is of: write it again .* or remove it", another=1)
    safetensors.numpy.save_file(tensors, path)
    with pytest.raises(UserError, match="doesn't say what recurrence it is of"):
        read_published(tmp_path)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "bert"}, "model_type 'bert' is not one of .*gpt2, .*llama"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "config.json: rope_scaling has no factor"),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "longrope"}}, "can't honour rope_type 'longrope', only"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "LinearScaling.factor=0.5 must be at least 1"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "mscale": 1}}, "can't honour mscale = 1 for rope_type 'lin"),
        ({"rope_scaling": "linear"}, "config.json: rope_scaling='linear' must be"),
        ({"sliding_window": 4096}, "can't honour sliding_window"),
        ({"attention_bias": True}, "can't honour attention_bias"),
        ({"hidden_act": "relu2"}, "hidden_act 'relu2' is not one of"),
        ({"layer_types": ["sliding_attention"]}, r"can't honour layer_types = \['sliding_attention'\]"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers='two' must be"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"num_key_value_heads": 4}, "config.json: num_heads=6 must be a multiple of num_key_value_heads=4"),
        ({"num_attention_heads": 0}, "config.json: num_attention_heads = 0 must be positive"),
        ({"num_hidden_layers": 3}, r"has no tensor model.layers.2.\w+.\w+.weight: it is not the model that its config"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be finite"),
        ({"rope_parameters": {"rope_theta": "x"}}, "config.json: rope_parameters: rope_theta='x' must be"),
        ({"model_type": ["llama"]}, r"model_type \['llama'\] is not one of"),
    ],
)
def test_what_cannot_be_honoured_is_named(tmp_path, changes, message):
    write_windows(random_llama(), 0, tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(UserError, match=message):
        read_published(tmp_path)


def test_newer_and_harmless_fields(tmp_path):
    write_windows(random_llama(), 0, tmp_path)
    config = tmp_path / "config.json"
    saved = json.loads(config.read_text())
    del saved["rope_theta"]
    saved |= {"rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}, "use_cache": True, "new_switch": False}
    saved["_num_labels"] = 1  # of DistilGPT-2
    config.write_text(json.dumps(saved))
    assert read_published(tmp_path).config == LLAMA_CONFIG
