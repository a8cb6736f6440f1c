"""Fills our parameters with the arrays of other programs' files; the places of the parameters of pretrained models."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import gguf
import jax
import jax.numpy as jnp
import numpy as np

from meliad_like.errors import UserError
from meliad_like.models.model import Model
from meliad_like.models.pretrained.config import PretrainedConfig


def fill_parameters(
    template: Any,
    names: Iterable[str],
    name_of: Callable[[str], str],
    read: Callable[[str, str, Any], np.ndarray],
    owner: str,
) -> Any:
    """Fills our parameters, float32, one after the other, so that only one additional array is in memory.

    Args:
      template: tree of the shapes of our parameters.
      names: names of the arrays in the checkpoint; each must be used.
      name_of: path of a parameter of ours, such as `layers/0/key/kernel` -> the name of its array.
      read: (our path, name of the array, our shape) -> the array, laid out as ours.
      owner: the file or folder, for messages.

    Raises:
      UserError: an array is missing, has another shape, or has no place in the model.
    """
    names = frozenset(names)
    left_over = set(names)

    def fill(path: str, leaf: Any) -> jax.Array:
        name = name_of(path)
        if name not in names:
            raise UserError(f"{owner} has no tensor {name}: it is not the model that its config describes")
        left_over.discard(name)
        array = read(path, name, leaf)
        if array.shape != leaf.shape:
            raise UserError(f"{owner}: {name} has shape {array.shape}, its config asks for {leaf.shape}")
        # Copies are made in the background; wait, so that this array is freed before the next is read.
        return jax.block_until_ready(jnp.asarray(np.ascontiguousarray(array, np.float32)))

    leaves, structure = jax.tree.flatten_with_path(template)
    filled: list[Any] = [None] * len(leaves)
    # The largest array comes first, while most memory is free.
    for i in sorted(range(len(leaves)), key=lambda i: -leaves[i][1].size):
        filled[i] = fill(path_name(leaves[i][0]), leaves[i][1])
    if left_over:
        raise UserError(
            f"{owner} has a tensor {min(left_over)} that the model of its config has no place for "
            f"({len(left_over)} such tensors)"
        )
    return jax.tree.unflatten(structure, filled)


def path_name(path: Any) -> str:
    """The name of a parameter of ours: the keys of its path, joined by "/"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def by_name(params: Any) -> dict[str, np.ndarray]:
    """Our parameters by their names."""
    return {path_name(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(params)}


class Place(NamedTuple):
    """The place of one of our parameters in a file of a pretrained model."""

    name: str
    """Name of the tensor; `{}` stands for the layer's number."""
    transposed: bool = False
    """Whether the tensor is [out, in]. Our kernels are [in, out]."""
    part: int | None = None
    """The third of the tensor's last axis that it is: GPT-2 has queries, keys and values in one tensor."""


def _linear(ours: str, theirs: str, **how: Any) -> dict[str, Place]:
    return {
        f"{ours}/kernel": Place(f"{theirs}.weight", **how),
        f"{ours}/bias": Place(f"{theirs}.bias", part=how.get("part")),
    }


def _norm(ours: str, theirs: str) -> dict[str, Place]:
    return {f"{ours}/scale": Place(f"{theirs}.weight"), f"{ours}/bias": Place(f"{theirs}.bias")}


GPT2 = {
    "embedding": Place("transformer.wte.weight"),
    "positions": Place("transformer.wpe.weight"),
    "output_embedding": Place("lm_head.weight"),
    **_norm("final_norm", "transformer.ln_f"),
    **_norm("attention_norm", "transformer.h.{}.ln_1"),
    **_linear("query", "transformer.h.{}.attn.c_attn", part=0),
    **_linear("key", "transformer.h.{}.attn.c_attn", part=1),
    **_linear("value", "transformer.h.{}.attn.c_attn", part=2),
    **_linear("output", "transformer.h.{}.attn.c_proj"),
    **_norm("feedforward_norm", "transformer.h.{}.ln_2"),
    **_linear("feedforward_hidden", "transformer.h.{}.mlp.c_fc"),
    **_linear("feedforward_output", "transformer.h.{}.mlp.c_proj"),
}
LLAMA = {
    "embedding": Place("model.embed_tokens.weight"),
    "output_embedding": Place("lm_head.weight"),
    **_norm("final_norm", "model.norm"),
    **_norm("attention_norm", "model.layers.{}.input_layernorm"),
    **_linear("query", "model.layers.{}.self_attn.q_proj", transposed=True),
    **_linear("key", "model.layers.{}.self_attn.k_proj", transposed=True),
    **_linear("value", "model.layers.{}.self_attn.v_proj", transposed=True),
    **_linear("output", "model.layers.{}.self_attn.o_proj", transposed=True),
    **_norm("feedforward_norm", "model.layers.{}.post_attention_layernorm"),
    **_linear("feedforward_gate", "model.layers.{}.mlp.gate_proj", transposed=True),
    **_linear("feedforward_hidden", "model.layers.{}.mlp.up_proj", transposed=True),
    **_linear("feedforward_output", "model.layers.{}.mlp.down_proj", transposed=True),
}
_IN_GGUF = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)


def _gguf_name(name: str) -> str:
    found = _IN_GGUF.get_name(name.format(0), (".weight", ".bias"))
    assert found is not None
    return found.replace("blk.0.", "blk.{}.")


GGUF_LLAMA = {ours: where._replace(name=_gguf_name(where.name)) for ours, where in LLAMA.items()}


def place(table: Mapping[str, Place], path: str) -> Place:
    """The place in a file of our parameter with this path, such as `blocks/0/query/kernel`."""
    if match := re.fullmatch(r"blocks/(\d+)/(.+)", path):
        found = table[match[2]]
        return found._replace(name=found.name.format(match[1]))
    return table[path]


def read_parameters(
    table: Mapping[str, Place],
    config: PretrainedConfig,
    vocabulary_size: int,
    names: Collection[str],
    read: Callable[[str], np.ndarray],
    owner: str,
) -> dict[str, Any]:
    """Reads the parameters of a decoder from the tensors of a file.

    Args:
      table: the places of the kind of file.
      names: names of the file's tensors.
      read: function that reads a tensor by its name.
      owner: the file or folder, for messages.
    """
    # Before arrays of the config's sizes are allocated.
    if (last := place(table, f"blocks/{config.num_layers - 1}/query/kernel").name) not in names:
        raise UserError(f"{owner} has no tensor {last}: it is not the model that its config describes")
    template = Model(config, vocabulary_size).abstract_params

    def read_as_ours(path: str, name: str, leaf: Any) -> np.ndarray:
        where, found = place(table, path), read(name)
        if where.part is not None:
            size = leaf.shape[-1]
            if found.shape[-1] != 3 * size:
                raise UserError(f"{owner}: {name} has shape {found.shape}, its last axis should be {3 * size}")
            found = found[..., where.part * size : (where.part + 1) * size]
        return found.T if where.transposed else found

    return fill_parameters(template, names, lambda path: place(table, path).name, read_as_ours, owner)


def to_tensors(table: Mapping[str, Place], params: dict[str, Any]) -> dict[str, np.ndarray]:
    """The tensors of a file, made from our parameters; the inverse of `read_parameters` (GGUF is only read)."""
    tensors: dict[str, Any] = {}
    for path, leaf in by_name(params).items():
        where = place(table, path)
        value = leaf.T if where.transposed else leaf
        if where.part is None:
            tensors[where.name] = np.ascontiguousarray(value)
        else:
            tensors.setdefault(where.name, [None] * 3)[where.part] = value
    return {name: np.concatenate(x, axis=-1) if isinstance(x, list) else x for name, x in tensors.items()}
