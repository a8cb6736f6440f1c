"""The mapping between parameter names of pretrained models in safetensors and GGUF files and ours."""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from meliad_like.conversion.matching import fill_parameters, path_name
from meliad_like.errors import UserError
from meliad_like.models.pretrained.config import PretrainedConfig


class Place(NamedTuple):
    """The place of one of our parameters in a file."""

    name: str
    """Name of the tensor; `{}` stands for the layer's number."""
    transposed: bool = False
    """Whether the tensor is [out, in]. Our kernels are [in, out]."""
    part: int | None = None
    """The third of the tensor's last axis that it is: GPT-2 has queries, keys and values in one tensor."""
    interleaved: bool = False
    """Whether rotary pairs are adjacent, as in GGUF. In our parameters their distance is half a head."""


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
GGUF_LLAMA = {
    "embedding": Place("token_embd.weight"),
    "output_embedding": Place("output.weight"),
    **_norm("final_norm", "output_norm"),
    **_norm("attention_norm", "blk.{}.attn_norm"),
    **_linear("query", "blk.{}.attn_q", transposed=True, interleaved=True),
    **_linear("key", "blk.{}.attn_k", transposed=True, interleaved=True),
    **_linear("value", "blk.{}.attn_v", transposed=True),
    **_linear("output", "blk.{}.attn_output", transposed=True),
    **_norm("feedforward_norm", "blk.{}.ffn_norm"),
    **_linear("feedforward_gate", "blk.{}.ffn_gate", transposed=True),
    **_linear("feedforward_hidden", "blk.{}.ffn_up", transposed=True),
    **_linear("feedforward_output", "blk.{}.ffn_down", transposed=True),
}


def place(table: Mapping[str, Place], path: str) -> Place:
    """The place in a file of our parameter with this path, such as `blocks/0/query/kernel`."""
    if match := re.fullmatch(r"blocks/(\d+)/(.+)", path):
        found = table[match[2]]
        return found._replace(name=found.name.format(match[1]))
    return table[path]


def check_num_layers(table: Mapping[str, Place], config: PretrainedConfig, names: Iterable[str], owner: str) -> None:
    """Refuses a file that lacks the last layer of its config, before arrays of the config's sizes are allocated.

    Raises:
      UserError: a tensor of that layer is missing.
    """
    last = place(table, f"blocks/{config.num_layers - 1}/query/kernel").name
    if last not in names:
        raise UserError(f"{owner} has no tensor {last}: it is not the model that its config describes")


def read_parameters(
    table: Mapping[str, Place],
    template: dict[str, Any],
    config: PretrainedConfig,
    names: Iterable[str],
    read: Callable[[str], np.ndarray],
    owner: str,
) -> dict[str, Any]:
    """Reads our parameters from the tensors of a file.

    Args:
      table: the places of the kind of file.
      template: shapes of our parameters, only those of the decoder.
      config: config of the decoder.
      names: names of the file's tensors.
      read: function that reads a tensor by its name.
      owner: the file or folder, for messages.

    Raises:
      UserError: a tensor is missing, of another shape, or has no place in the model.
    """

    def read_as_ours(path: str, name: str, leaf: Any) -> np.ndarray:
        where, found = place(table, path), read(name)
        if where.part is not None:
            size = leaf.shape[-1]
            if found.shape[-1] != 3 * size:
                raise UserError(f"{owner}: {name} has shape {found.shape}, its last axis should be {3 * size}")
            found = found[..., where.part * size : (where.part + 1) * size]
        if where.interleaved and found.ndim == 2:
            by_pair = found.reshape(-1, config.head_size // 2, 2, found.shape[-1])
            found = np.swapaxes(by_pair, 1, 2).reshape(found.shape)
        return found.T if where.transposed else found

    return fill_parameters(template, names, lambda path: place(table, path).name, read_as_ours, owner)


def to_tensors(table: Mapping[str, Place], params: dict[str, Any]) -> dict[str, np.ndarray]:
    """The tensors of a file, made from our parameters; the inverse of `read_parameters` (GGUF is only read)."""
    tensors: dict[str, Any] = {}
    for path, leaf in jax.tree.leaves_with_path(params):
        where = place(table, path_name(path))
        value = np.asarray(leaf).T if where.transposed else np.asarray(leaf)
        if where.part is None:
            tensors[where.name] = np.ascontiguousarray(value)
        else:
            tensors.setdefault(where.name, [None] * 3)[where.part] = value
    return {name: np.concatenate(x, axis=-1) if isinstance(x, list) else x for name, x in tensors.items()}
