"""Checkpoints of the reference become ours and come back, for every gate."""

import dataclasses
import functools
import json
from pathlib import Path

import forked
import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from decoders import recurrent, with_mixer

from meliad_like.config import RunConfig, parse
from meliad_like.conversion.meliad import (
    convert_from_meliad,
    convert_to_meliad,
    from_meliad,
    read_meliad,
    to_meliad,
)
from meliad_like.data.readers import LanesReaderConfig
from meliad_like.errors import UserError
from meliad_like.families.melodi import MelodiConfig
from meliad_like.mixers.dense_memory import DenseMemory
from meliad_like.mixers.positions import Alibi, PositionConfig, Rotary
from meliad_like.mixers.recurrent_states import RecurrentStates
from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.model import Model
from meliad_like.run.opening import open_checkpoint
from meliad_like.vocabularies.base import BytesVocabularyConfig
from meliad_like.vocabularies.sentencepiece import SentencePieceVocabularyConfig

STATISTICS = json.loads((Path(__file__).parent / "golden" / "i_init_statistics.json").read_text())
V = 257
SIZES = {"num_layers": 2, "model_width": 8, "num_heads": 2, "head_size": 4, "feedforward_width": 16, "window_length": 4}
CONFIG = with_mixer(DecoderConfig(**SIZES), RecurrentStates(num_states=3), (1,))


def config_of(name):
    if name == "slide":
        return dataclasses.replace(CONFIG, pattern=DecoderConfig.pattern, mixers=())
    gate, cell = name.split("_")
    return recurrent(CONFIG, gate=gate, cell=cell)


def run_of(config):
    return RunConfig(model=config, data=LanesReaderConfig(segment_length=8, tokens_per_step=8))


def reference_arrays(config, seed=0):
    """Parameters under the reference's names, all different."""
    generator = np.random.default_rng(seed)
    shapes = to_meliad(jax.tree.map(lambda x: np.zeros(x.shape), Model(config, V).abstract_params))
    return {name: generator.normal(size=zeros.shape).astype(np.float32) for name, zeros in shapes.items()}


@pytest.mark.parametrize("name", STATISTICS)
def test_names_there_and_back(name):
    config = config_of(name)
    theirs = reference_arrays(config)
    assert theirs.keys() == {name for name in STATISTICS[name] if not name.startswith("__")}
    ours = from_meliad(theirs, Model(config, V).abstract_params)
    back = to_meliad(ours)
    assert back.keys() == theirs.keys()
    for key in theirs:
        np.testing.assert_array_equal(back[key], theirs[key])


NEWER = {
    "melodi": MelodiConfig(**SIZES, long_layers=(0,), num_summaries=3, short_length=3, long_length=2, long_slots=4),
    "dense": dataclasses.replace(
        CONFIG,
        pattern=("sliding_window+feedforward", ((1,), "dense_memory+feedforward")),
        mixers=(DenseMemory(num_slots=8),),
        doubled_inputs=(1,),
    ),
}


@pytest.mark.parametrize(("name", "bias"), list(zip(NEWER, [True, False])))
def test_files_of_the_newer_stack_there_and_back(name, bias, tmp_path):
    config = dataclasses.replace(NEWER[name], feedforward_bias=bias, num_layers=3)
    params = Model(config, V).init(jax.random.key(0))
    np.savez(tmp_path / "theirs.npz", **to_meliad(params, config))
    convert_from_meliad(tmp_path / "theirs.npz", run_of(config), tmp_path / "ours")
    jax.tree.map(np.testing.assert_array_equal, open_checkpoint(tmp_path / "ours").params, params)
    convert_to_meliad(tmp_path / "ours", tmp_path / "back.npz")
    with np.load(tmp_path / "theirs.npz") as theirs, np.load(tmp_path / "back.npz") as back:
        layers = {key.split("/")[1] for key in theirs if key.startswith("layer_stack/")}
        assert layers >= ({"melodi_layers_2"} if name == "melodi" else {"transformer0", "transformer1", "side_layer"})
        assert set(back) == set(theirs)
        for key in theirs:
            np.testing.assert_array_equal(back[key], theirs[key])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"doubled_inputs": ()}, r"DecoderConfig.doubled_inputs=\(1,\)"),
        ({"position": Rotary()}, "Rotary.unit='pi'"),
    ],
)
def test_what_the_newer_stack_lacks(changes, message, tmp_path):
    config = dataclasses.replace(NEWER["dense"], feedforward_bias=True, **changes)
    with pytest.raises(UserError, match=message):
        convert_from_meliad(tmp_path / "theirs.npz", run_of(config), tmp_path / "ours")


def test_the_newer_stack_without_biases_is_read(tmp_path):
    """Its feed-forward networks have the names of the older stack's."""
    config = dataclasses.replace(config_of("slide"), num_layers=1, position=PositionConfig())
    layer, kvq = "layer_stack/transformer0/tbase/", "layer_stack/transformer0/tbase/_kvq/"
    places = {
        "embed/embedding": ("embedding",),
        "layer_stack/final_layernorm/scale": ("final_norm", "scale"),
        f"{layer}pre_attn_layernorm/scale": ("layers", 0, "norm", "scale"),
        f"{layer}post_attn_mlp/output_layer/kernel": ("layers", 0, "output", "kernel"),
        f"{layer}pre_ffn_layernorm/scale": ("layers", 0, "feedforward", "norm", "scale"),
        f"{layer}ffn/hidden0/kernel": ("layers", 0, "feedforward", "network", "hidden", "kernel"),
        f"{layer}ffn/output_layer/kernel": ("layers", 0, "feedforward", "network", "output", "kernel"),
        **{
            f"{kvq}{theirs}": ("layers", 0, "mixers", "sliding_window", "heads", *ours)
            for theirs, ours in {
                "keys_layer/kernel": ("key", "kernel"),
                "values_layer/kernel": ("value", "kernel"),
                "queries_layer/kernel": ("query", "kernel"),
                "attention_scale": ("attention_scale",),
            }.items()
        },
    }
    ours = Model(config, V).init(jax.random.key(0))
    theirs = {
        name: np.asarray(functools.reduce(lambda tree, key: tree[key], path, ours)) for name, path in places.items()
    }
    jax.tree.map(np.testing.assert_array_equal, from_meliad(theirs, Model(config, V).abstract_params, config), ours)


def test_a_learned_slope_keeps_its_shape(tmp_path):
    config = dataclasses.replace(config_of("slide"), position=Alibi(learned_slope=True))
    theirs = reference_arrays(config)
    assert theirs["transformer0/relative_positions/_wrapped_module/scale"].shape == ()
    back = to_meliad(from_meliad(theirs, Model(config, V).abstract_params, config), config)
    jax.tree.map(np.testing.assert_array_equal, back, theirs)
    assert {name: array.shape for name, array in back.items()} == {name: each.shape for name, each in theirs.items()}


def test_absolute_positions_that_have_no_parameters_are_not_lost_silently(tmp_path):
    config = dataclasses.replace(config_of("slide"), position=PositionConfig())
    with pytest.raises(UserError, match="absolute positions"):
        convert_from_meliad(tmp_path / "theirs.npz", run_of(config), tmp_path / "ours")


@pytest.mark.parametrize("name", ["slide", "fixed_skip", "lstm_dual"])
def test_files_there_and_back(name, tmp_path):
    run, theirs = run_of(config_of(name)), reference_arrays(config_of(name))
    np.savez(tmp_path / "theirs.npz", **theirs)
    convert_from_meliad(tmp_path / "theirs.npz", run, tmp_path / "ours")
    opened = open_checkpoint(tmp_path / "ours")
    assert (opened.run, opened.step, opened.vocabulary.size) == (run, 0, V)
    np.testing.assert_array_equal(opened.params["embedding"], theirs["embed/embedding"])
    convert_to_meliad(tmp_path / "ours", tmp_path / "back.npz")
    with np.load(tmp_path / "back.npz") as back:
        assert set(back) == theirs.keys()
        for key in theirs:
            np.testing.assert_array_equal(back[key], theirs[key])


def nested(arrays):
    tree = {}
    for name, array in arrays.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = array
    return tree


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tree: tree,
        lambda tree: {"params": tree},
        lambda tree: {"target": tree, "state": {"step": np.zeros(())}},
        lambda tree: {"optimizer": {"target": {"params": tree}, "state": {"mu": tree}}},
    ],
)
def test_orbax_folders(wrap, tmp_path):
    theirs = reference_arrays(CONFIG)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "theirs", wrap(nested(theirs)))
    read = read_meliad(tmp_path / "theirs")
    assert read.keys() == theirs.keys()
    for key in theirs:
        np.testing.assert_array_equal(read[key], theirs[key])


def test_an_orbax_step_folder(tmp_path):
    theirs = reference_arrays(CONFIG)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(5, args=ocp.args.StandardSave({"params": nested(theirs)}))
    assert read_meliad(tmp_path / "run" / "5").keys() == theirs.keys()
    with pytest.raises(UserError, match="run is not an orbax checkpoint .* give the folder of one step"):
        read_meliad(tmp_path / "run")


def test_npz_under_a_root(tmp_path):
    theirs = reference_arrays(CONFIG)
    named = {f"optimizer/target/{name}": array for name, array in theirs.items()}
    np.savez(tmp_path / "theirs.npz", **named, step=np.asarray(3))
    assert read_meliad(tmp_path / "theirs.npz").keys() == theirs.keys()


def without(arrays, name):
    return {key: value for key, value in arrays.items() if key != name}


def test_what_does_not_fit_is_named(tmp_path):
    theirs, output = reference_arrays(CONFIG), tmp_path / "ours"

    def convert(arrays, config=CONFIG):
        np.savez(tmp_path / "theirs.npz", **arrays)
        convert_from_meliad(tmp_path / "theirs.npz", run_of(config), output)

    with pytest.raises(UserError, match="has no tensor transformer0/tbase/ffn/hidden0/kernel"):
        convert(without(theirs, "transformer0/tbase/ffn/hidden0/kernel"))
    num_left = sum(name.startswith("transformer1/") for name in theirs)
    with pytest.raises(UserError, match=rf"has a tensor transformer1/.* no place for \({num_left} such tensors\)"):
        convert(theirs, dataclasses.replace(config_of("slide"), num_layers=1))
    with pytest.raises(UserError, match=r"transformer0/.* has shape .*, its config asks for"):
        convert(theirs, dataclasses.replace(CONFIG, feedforward_width=32))
    with pytest.raises(UserError, match=r"260 tokens and the vocabulary of the config 257.*size_multiple=260"):
        convert(theirs | {"embed/embedding": np.zeros((260, 8), np.float32)})
    with pytest.raises(UserError, match="is not a checkpoint of meliad: it has final_layernorm/scale"):
        convert(without(theirs, "embed/embedding"))
    assert not output.exists()


def test_unused_ids_are_kept(tmp_path):
    theirs = reference_arrays(CONFIG) | {"embed/embedding": np.ones((260, 8), np.float32)}
    np.savez(tmp_path / "theirs.npz", **theirs)
    run = dataclasses.replace(run_of(CONFIG), vocabulary=BytesVocabularyConfig(size_multiple=260))
    convert_from_meliad(tmp_path / "theirs.npz", run, tmp_path / "ours")
    assert open_checkpoint(tmp_path / "ours").model.vocabulary_size == 260
    with pytest.raises(UserError, match=r"has checkpoints already \(step 0\)"):
        convert_from_meliad(tmp_path / "theirs.npz", run, tmp_path / "ours")


def test_unusable_files(tmp_path):
    with pytest.raises(UserError, match="cannot read .*none.npz: No such file"):
        read_meliad(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("text")
    (tmp_path / "empty.npz").write_text("")
    np.save(tmp_path / "one.npy", np.zeros(3))
    np.savez_compressed(tmp_path / "damaged.npz", **reference_arrays(CONFIG))
    damaged = bytearray((tmp_path / "damaged.npz").read_bytes())
    # The compressed data of the first array begins with zeros; the archive's list of files is whole.
    first = damaged.index(b".npy") + 4
    damaged[first : first + 40] = bytes(40)
    (tmp_path / "damaged.npz").write_bytes(damaged)
    for name in ("text.npz", "empty.npz", "one.npy", "damaged.npz"):
        with pytest.raises(UserError, match=f"{name} is damaged, or no npz file"):
            read_meliad(tmp_path / name)
    half = {name: array.astype(ml_dtypes.bfloat16) for name, array in reference_arrays(CONFIG).items()}
    np.savez(tmp_path / "half.npz", **half)
    with pytest.raises(UserError, match="half.npz: .* has no type that numpy knows, such as bfloat16: save it as fl"):
        read_meliad(tmp_path / "half.npz")
    with pytest.raises(UserError, match="must end in .npz"):
        convert_to_meliad(tmp_path, tmp_path / "folder")
    run = dataclasses.replace(run_of(CONFIG), vocabulary=SentencePieceVocabularyConfig())
    np.savez(tmp_path / "theirs.npz", **reference_arrays(CONFIG))
    with pytest.raises(UserError, match="would have to be trained"):
        convert_from_meliad(tmp_path / "theirs.npz", run, tmp_path / "ours")


def convert(*arguments):
    return forked.run("-m", "meliad_like.convert", *map(str, arguments))


def test_command_line(tmp_path):
    golden = Path(__file__).parent / "golden" / "d_lm_fixed_skip.npz"
    with np.load(golden) as file:
        theirs = {name.removeprefix("params/"): file[name] for name in file if name.startswith("params/")}
    theirs["embed/embedding"] = np.resize(theirs["embed/embedding"], (V, 32))
    np.savez(tmp_path / "theirs.npz", **theirs)
    files = ("size/tiny.gin", "block_recurrent/fixed_skip.gin", "option/unmasked_empty_cache.gin")
    there = convert(
        "meliad",
        f"--input={tmp_path / 'theirs.npz'}",
        f"--output={tmp_path / 'ours'}",
        *(f"--gin_file={name}" for name in files),
    )
    assert there.returncode == 0, there.stderr
    back = convert("meliad", "--reverse", f"--input={tmp_path / 'ours'}", f"--output={tmp_path / 'back.npz'}")
    assert back.returncode == 0, back.stderr
    with np.load(tmp_path / "back.npz") as file:
        np.testing.assert_array_equal(file["embed/embedding"], theirs["embed/embedding"])


SUBJECTS = "meliad or meliad_gin or huggingface or stablehlo"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], f"the first argument must be {SUBJECTS}, which is missing"),
        (["gpt2"], f"the first argument must be {SUBJECTS}, not 'gpt2'"),
        (["meliad", "b"], "unexpected argument 'b'"),
        (["huggingface", "--dtype=bfloat16"], "--dtype has no effect without --reverse"),
    ],
)
def test_mistakes_are_one_line(words, message):
    done = convert(*words, "--input=a", "--output=b")
    assert (done.returncode, done.stderr.strip().splitlines()[-1][: len(message) + 7]) == (2, f"error: {message}")


def test_a_shortformer_is_not_the_references(tmp_path):
    run = parse(["shortformer/infused_cache.gin"])
    with pytest.raises(UserError, match="the reference has decoders alone, and this model is a shortformer"):
        convert_from_meliad("theirs.npz", run, tmp_path)
