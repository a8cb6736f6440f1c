"""Checkpoints of google-research/meliad: reads npz files and orbax folders, and converts them to ours and back.

Only the names of parameters differ: kernels are [in, out] and heads major in both, and where self- and cross-attention
are concatenated the heads of self-attention come first. The reference has two stacks with names of their own: the older
one of the recurrences, and the newer one, whose feed-forward networks have biases, of MELODI and the dense memory.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pandas as pd
from etils import epath

from meliad_like.config import RunConfig
from meliad_like.conversion.parameters import NEWER_FIELDS, fill, vocabulary_of, write_checkpoint
from meliad_like.errors import DAMAGED_NPZ, UserError, reading
from meliad_like.families.melodi import MelodiConfig
from meliad_like.mixers.dense_memory import DenseMemory
from meliad_like.mixers.positions import PositionConfig, Rotary
from meliad_like.models.config import MODELS
from meliad_like.models.decoder import DecoderConfig, StackConfig
from meliad_like.models.model import Model
from meliad_like.remote import replacing
from meliad_like.run.opening import open_checkpoint
from meliad_like.training.checkpoints import named_arrays

# The places of the parameters in checkpoints of different versions of flax; the first match counts.
ROOTS = ("", "params/", "target/", "target/params/", "optimizer/target/", "optimizer/target/params/")
EMBEDDING = "embed/embedding"
NEWER_PREFIX = "layer_stack/"
SLIDE = DecoderConfig()

NAMES = pd.read_csv(Path(__file__).with_suffix(".csv"), index_col="ours")
"""The names of our parameters in the reference's `older` and `newer` stack; in layers without the layer's prefix."""
SUMMARY_MIX = "token_mixing_summary/"


def _dense_layers(config: StackConfig) -> list[int]:
    return config.layers_with(DenseMemory) if isinstance(config, DecoderConfig) else []


def _layer_prefixes(config: StackConfig, newer: bool) -> list[str]:
    """The prefixes of the layers in one of the reference's stacks."""
    layers = range(config.total_layers)
    if not newer:
        return [f"transformer{i}/" for i in layers]
    if isinstance(config, MelodiConfig):
        return [f"layer_stack/melodi_layers_{i}/melodi_layer/" for i in layers]
    prefixes, dense = [f"layer_stack/transformer{i}/" for i in layers], _dense_layers(config)
    if dense:
        # The dense layer is not counted among the layers of the stack.
        [side] = dense
        prefixes = [*prefixes[:side], "layer_stack/side_layer/", *prefixes[side:-1]]
    return prefixes


def _newer(config: StackConfig) -> bool:
    """Whether such a model exists only in the newer stack."""
    return config.feedforward_bias or isinstance(config, MelodiConfig) or bool(_dense_layers(config))


def _names(config: StackConfig, newer: bool) -> Callable[[str], str]:
    """The function from a path of ours to the reference's name."""
    names, prefixes = NAMES["newer" if newer else "older"].dropna().to_dict(), _layer_prefixes(config, newer)
    if newer and not config.feedforward_bias:
        # The newer stack has two modules for the feed-forward network: that without biases is the older stack's.
        names |= NAMES["older"].filter(like="feedforward/network/").dropna()

    def name_of(path: str) -> str:
        match = re.fullmatch(r"layers/(\d+)/(.+)", path)
        prefix, name = (prefixes[int(match[1])], match[2]) if match else ("", path)
        # The reference has the heads of tokens, and their attention to states, in the layer.
        name = re.sub(r"^mixers/\w+/(?:window/)?(heads|reader)/", r"\1/", name)
        if name not in names:
            raise UserError(f"the reference has no parameter like our {path}: it lacks that mixer")
        return prefix + names[name]

    return name_of


def _idle(config: StackConfig) -> str | None:
    """The prefix of the parameters with which the reference's last layer mixes summaries that nothing reads."""
    return _layer_prefixes(config, newer=True)[-1] + SUMMARY_MIX if isinstance(config, MelodiConfig) else None


def from_meliad(
    theirs: Mapping[str, np.ndarray], template: dict[str, Any], config: StackConfig = SLIDE
) -> dict[str, Any]:
    """Our parameter tree filled from the reference's parameters by their names.

    Args:
      theirs: the reference's parameters; idle ones are dropped.
      template: a tree of the shapes of our parameters, or a part of it.
      config: the config of the model, for the names of its stack.
    """
    idle = _idle(config)
    used = [name for name in theirs if idle is None or not name.startswith(idle)]
    newer = _newer(config) or any(name.startswith(NEWER_PREFIX) for name in theirs)
    name_of = _names(config, newer)
    return fill(template, used, lambda path: (name_of(path),), lambda path: theirs[name_of(path)], "the checkpoint")


def to_meliad(params: dict[str, Any], config: StackConfig = SLIDE) -> dict[str, np.ndarray]:
    """The reference's flat parameters from ours; the inverse of `from_meliad`.

    Its idle parameters are zeros, and ones for the scales of norms.
    """
    name_of, idle = _names(config, _newer(config)), _idle(config)
    theirs = {name_of(path): np.asarray(x) for path, x in named_arrays(params).items()}
    if isinstance(config, MelodiConfig):
        u, d = config.num_summaries, config.model_width
        theirs[f"{idle}lin_mix/kernel"] = np.zeros((config.window_length + u, u), np.float32)
        theirs[f"{idle}lin_mix/bias"] = np.zeros(u, np.float32)
        theirs |= {f"{idle}layernorm{i}/scale": np.ones(d, np.float32) for i in (1, 2)}
    return theirs


def read_meliad(path: str | Path) -> dict[str, np.ndarray]:
    """Reads the parameters of a checkpoint of the reference, by names joined by "/".

    Args:
      path: an npz file with such names, or an orbax folder of nested dictionaries. The parameters may be under
        `params`, `target` or `optimizer/target`; other entries are ignored.
    """
    path = Path(path)
    if path.is_dir():
        arrays = _read_orbax(path)
    else:
        with reading(path, "npz file", *DAMAGED_NPZ), np.load(path) as file:
            arrays = dict(file)
        for name, array in arrays.items():
            if array.dtype.type is np.void:
                # An npz file stores only the size of such numbers, not their type.
                raise UserError(f"{path}: {name} has no type that numpy knows, such as bfloat16: save it as float32")
    for root in ROOTS:
        if root + EMBEDDING in arrays:
            return {name.removeprefix(root): arrays[name] for name in arrays if name.startswith(root)}
    raise UserError(
        f"{path} is not a checkpoint of meliad: it has {', '.join(sorted(arrays)[:3]) or 'nothing'} ..., but no "
        f"{EMBEDDING} at the top or under {', '.join(ROOTS[1:])}"
    )


def _read_orbax(folder: Path) -> dict[str, np.ndarray]:
    # A checkpoint manager saves the arrays in the folder `default` of the step's folder.
    candidates = [place for place in (folder, folder / "default") if (place / "_METADATA").is_file()]
    if not candidates:
        raise UserError(f"{folder} is not an orbax checkpoint (no _METADATA in it): give the folder of one step")
    checkpointer = ocp.PyTreeCheckpointer()
    place = epath.Path(candidates[0].resolve())
    item = checkpointer.metadata(place).item_metadata
    assert item is not None
    # Restored as numpy arrays, whatever devices they were saved from.
    as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item.tree)
    restored = checkpointer.restore(place, restore_args=as_numpy)
    return {name: np.asarray(leaf) for name, leaf in named_arrays(restored).items()}


def convert_from_meliad(path: str | Path, run: RunConfig, folder: str | Path) -> None:
    """Writes our checkpoint folder at step 0, for evaluation, generation and fine-tuning."""
    model = _checked(run, "--gin_file")
    if type(model.position) is PositionConfig:
        raise UserError(
            "--gin_file: a checkpoint without relative positions doesn't say whether its model adds absolute positions "
            "to the embeddings, which have no parameters; models without any positions can't be told from those"
        )
    theirs = read_meliad(path)
    vocabulary = vocabulary_of(run, len(theirs[EMBEDDING]), path)
    params = from_meliad(theirs, Model(model, vocabulary.size).abstract_params, model)
    write_checkpoint(folder, params, run, vocabulary)


def convert_to_meliad(folder: str | Path, path: str | Path) -> None:
    """Writes the parameters of our newest checkpoint as an npz file under the reference's names."""
    path = Path(path)
    if path.suffix != ".npz":
        raise UserError(f"{path} must end in .npz")
    opened = open_checkpoint(folder)
    theirs = to_meliad(opened.params, _checked(opened.run, str(folder)))
    with replacing(path) as file:
        np.savez(file, **theirs)  # type: ignore[arg-type]  # its stub takes names for options


def _checked(run: RunConfig, origin: str) -> StackConfig:
    """The model's config, if the reference has such models."""
    model = run.model
    if not isinstance(model, StackConfig):
        raise UserError(f"{origin}: the reference has decoders alone, and this model is a {MODELS.name_of(model)}")
    position, dense, problems = model.position, _dense_layers(model), []
    if isinstance(position, Rotary) and position.unit != "pi":
        problems.append("the reference's rotary positions have Rotary.unit='pi'")
    newer = NEWER_FIELDS
    if isinstance(model, DecoderConfig):
        newer = ("norms_after", "norms_around", *newer)
        if model.layers_of("doubled_inputs") != set(dense):
            twice = f"DecoderConfig.doubled_inputs={tuple(dense)}"
            problems.append(f"in the reference the dense layer's input counts twice: {twice}")
        if model.feedforwards != SLIDE.feedforwards:
            problems.append("the reference has plain feed-forward networks alone")
    other = [name for name in newer if getattr(model, name) != getattr(SLIDE, name)]
    problems += [f"the reference has no DecoderConfig.{name}" for name in other]
    if len(dense) > 1:
        problems.append("the reference has one layer with a dense memory")
    if problems:
        raise UserError(f"{origin}: {problems[0]}")
    return model
