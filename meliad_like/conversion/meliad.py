"""Checkpoints of google-research/meliad: reads npz files and orbax folders, and converts them to ours and back.

Only the names of parameters differ: kernels are [in, out] and heads major in both, and where self- and cross-attention
are concatenated the heads of self-attention come first.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from meliad_like.config import RunConfig
from meliad_like.conversion.parameters import Place, fill_parameters, to_tensors, vocabulary_of
from meliad_like.errors import DAMAGED_NPZ, UserError, reading
from meliad_like.mechanisms.positions import Infused
from meliad_like.models.base import MODELS
from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.model import Model
from meliad_like.remote import replacing
from meliad_like.run.opening import open_checkpoint, write_checkpoint
from meliad_like.training.checkpoints import named_arrays

# The places of the parameters in checkpoints of different versions of flax; the first match counts.
ROOTS = ("", "params/", "target/", "target/params/", "optimizer/target/", "optimizer/target/params/")
EMBEDDING = "embed/embedding"

_FEEDFORWARD = {
    "hidden/kernel": "tbase/ffn/hidden0/kernel",
    "output/kernel": "tbase/ffn/output_layer/kernel",
}
_HEADS = {
    "key/kernel": "tbase/_kvq/keys_layer/kernel",
    "value/kernel": "tbase/_kvq/values_layer/kernel",
    "query/kernel": "tbase/_kvq/queries_layer/kernel",
    "attention_scale": "tbase/_kvq/attention_scale",
}
# The reference keeps the cross-attention scale outside of `_kvq`.
_READER = {
    "cross_query/kernel": "tbase/_kvq/queries2_layer/kernel",
    "cross_attention_scale": "tbase/attention_scale2",
}
_GATE = {
    "bias": "gate_bias",
    "forget/kernel": "forget_gate/kernel",
    "forget/bias": "forget_gate/bias",
    "input/kernel": "input_gate/kernel",
    "input/bias": "input_gate/bias",
}
_BLOCK = {
    "output/kernel": "tbase/post_attn_mlp/output_layer/kernel",
    "feedforward_norm/scale": "tbase/pre_ffn_layernorm/scale",
    **{f"feedforward/{ours}": theirs for ours, theirs in _FEEDFORWARD.items()},
}
_CELL = {
    "initial": "recurrent_initial_state",
    "identity": "recurrent_tbase/_kvq/position_embeddings",
    "norm/scale": "recurrent_tbase/_kvq/pre_attn_layernorm/scale",
    **{ours: "recurrent_" + theirs for ours, theirs in (_HEADS | _READER | _BLOCK).items()},
    **{f"attention_gate/{ours}": f"recurrent_tbase/post_attn_mlp/{theirs}" for ours, theirs in _GATE.items()},
    **{f"feedforward_gate/{ours}": f"recurrent_tbase/ffn/{theirs}" for ours, theirs in _GATE.items()},
}
# From our names to the reference's, within a layer.
_LAYER = {
    "attention_norm/scale": "tbase/_kvq/pre_attn_layernorm/scale",
    **_BLOCK,
    **{f"heads/{ours}": theirs for ours, theirs in _HEADS.items()},
    "heads/position/by_distance/table": "relative_positions/rel_embedding",
    "mechanisms/external_memory/gate": "external_memory_bias",
    **{f"mechanisms/recurrent_states/{ours}": theirs for ours, theirs in _READER.items()},
    **{f"mechanisms/recurrent_states/cell/{ours}": theirs for ours, theirs in _CELL.items()},
}
_TOP = {"embedding": "embed/embedding", "final_norm/scale": "final_layernorm/scale"}


def _place(path: str) -> Place:
    if not (match := re.fullmatch(r"layers/(\d+)/(.+)", path)):
        return Place(_TOP[path])
    if match[2] not in _LAYER:
        raise UserError(f"the reference has no parameter like our {path}: it lacks that mechanism")
    return Place(f"transformer{match[1]}/{_LAYER[match[2]]}")


def from_meliad(theirs: Mapping[str, np.ndarray], template: dict[str, Any]) -> dict[str, Any]:
    """Our parameter tree, in the shapes of `template`, filled from the reference's parameters by their names."""
    return fill_parameters(template, theirs, _place, theirs.__getitem__, "the checkpoint")


def to_meliad(params: dict[str, Any]) -> dict[str, np.ndarray]:
    """The reference's flat parameters from ours; the inverse of `from_meliad`."""
    return to_tensors(_place, params)


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
        f"{path} is no checkpoint of meliad: it has {', '.join(sorted(arrays)[:3]) or 'nothing'} ..., but no "
        f"{EMBEDDING} at the top or under {', '.join(ROOTS[1:])}"
    )


def _read_orbax(folder: Path) -> dict[str, np.ndarray]:
    # A checkpoint manager saves the arrays in the folder `default` of the step's folder.
    candidates = [place for place in (folder, folder / "default") if (place / "_METADATA").is_file()]
    if not candidates:
        raise UserError(f"{folder} is no orbax checkpoint (no _METADATA in it): give the folder of one step")
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
    _check_family(run, "--gin_file")
    theirs = read_meliad(path)
    vocabulary = vocabulary_of(run, len(theirs[EMBEDDING]), path)
    params = from_meliad(theirs, Model(run.model, vocabulary.size).abstract_params)
    write_checkpoint(folder, params, run, vocabulary)


def convert_to_meliad(folder: str | Path, path: str | Path) -> None:
    """Writes the parameters of our newest checkpoint as an npz file under the reference's names."""
    path = Path(path)
    if path.suffix != ".npz":
        raise UserError(f"{path} must end in .npz")
    opened = open_checkpoint(folder)
    _check_family(opened.run, str(folder))
    theirs = to_meliad(opened.params)
    try:
        with replacing(path) as file:
            np.savez(file, **theirs)  # type: ignore[arg-type]  # its stub takes names for options
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def _check_family(run: RunConfig, origin: str) -> None:
    if not isinstance(run.model, DecoderConfig):
        raise UserError(f"{origin}: the reference has decoders alone, and this model is a {MODELS.name_of(run.model)}")
    if isinstance(run.model.position, Infused):
        raise UserError(f"{origin}: the reference has no infused positions, and this model has")
