"""Mamba-2 (`model_type` mamba2), as Mamba-Codestral-7B and state-spaces/mamba2-* in the form of transformers."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from meliad_like.conversion.published.family import FILTERS, Family, Fields, Part, linear
from meliad_like.conversion.published.parts import decoder
from meliad_like.errors import UserError
from meliad_like.mixers.base import DecoderShape
from meliad_like.mixers.mamba2 import Mamba2
from meliad_like.models.decoder import DecoderConfig

SIZES = "num_heads", "state_size", "num_groups", "conv_length", "head_size"
"""Fields of our mixer."""


def recurrence(fields: Fields, sizes: Sequence[str], bias: str, conv_bias: str, **others: Any) -> Mamba2:
    """The mixer by the fields with these names, and by others of our config. `sizes` are the names of as many of
    `SIZES`; `bias` is that of its projections."""
    limits = fields("time_step_limit", list, [0.0, math.inf])
    # Newer versions of transformers write infinity as an object.
    smallest, largest = (float(x["__float__"] if isinstance(x, dict) else x) for x in limits)
    usual = {"min_step": smallest, "max_step": None if largest == math.inf else largest}
    usual |= dict.fromkeys(("input_bias", "output_bias"), fields(bias, bool, False))
    usual |= {"conv_bias": fields(conv_bias, bool, True)}
    return Mamba2(**dict(zip(SIZES, fields.sizes(*sizes))), **usual | others)


def recurrence_of_hybrid(fields: Fields, width: int | None = None, **others: Any) -> Mamba2:
    """The mixer by fields that begin with `mamba_`, and by these of our config. `width` is that of the values, if a
    field says it."""
    d, heads = fields.sizes("hidden_size", "mamba_n_heads")
    inner: int = fields("mamba_expand", int, 2) * d if width is None else width
    size = fields("mamba_d_head", int | str, "auto")
    size = inner // heads if size == "auto" else size
    if size * heads != inner:
        raise UserError(f"{fields.owner}: the width of Mamba-2, {inner}, must be {heads} times mamba_d_head={size}")
    fields.without_effect("mamba_chunk_size", "mamba_expand")
    sizes = ("mamba_n_heads", "mamba_d_state", "mamba_n_groups", "mamba_d_conv")
    return recurrence(fields, sizes, "mamba_proj_bias", "mamba_conv_bias", head_size=size, **others)


def places_of_mamba2(
    mixer: Mamba2,
    shape: DecoderShape,
    ours: str,
    theirs: str,
    factors: Sequence[float] = (1.0,) * 5,
    *,
    of_input: float = 1.0,
    of_output: float = 1.0,
) -> dict[str, Any]:
    """The places of a layer's mixer and output, as `places_of_attention`. The factors are those of the results of the
    input projection, gates, values, keys, queries and steps, and of its input."""
    path, width, of_groups = f"{ours}mixers/mamba2/", mixer.width(shape), mixer.of_groups
    names = "gate", "value", "key", "query", "step_size"
    ends_of_rows = np.cumsum([0, width, width, of_groups, of_groups, width // mixer.head_size]).tolist()
    places: dict[str, Any] = linear(f"{ours}output", f"{theirs}out_proj", of_output)
    for name, ends, factor in zip(names, pairwise(ends_of_rows), factors, strict=True):
        places |= linear(f"{path}{name}", f"{theirs}in_proj", factor, range(*ends), of_input)
    return places | {
        f"{path}filters": Part(f"{theirs}conv1d.weight", FILTERS),
        f"{path}filter_bias": Part(f"{theirs}conv1d.bias"),
        f"{path}log_rate": Part(f"{theirs}A_log"),
        f"{path}step_bias": Part(f"{theirs}dt_bias"),
        f"{path}skip": Part(f"{theirs}D"),
        f"{path}norm_scale": Part(f"{theirs}norm.weight"),
    }


class Mamba2Family(Family):
    """Layers of Mamba-2 alone."""

    model_types = ("mamba2",)
    embedding, final_norm, layers = "backbone.embeddings", "backbone.norm_f", "backbone.layers"
    norms, recurrence = ("norm",), "mixer"
    in_recurrence = staticmethod(places_of_mamba2)

    def name(self, tensor, config):
        # Older files.
        return tensor.replace("backbone.embedding.", "backbone.embeddings.")

    def decoder(self, fields):
        layers, h, p = fields.sizes("num_hidden_layers", "num_heads", "head_dim")
        epsilon = fields("layer_norm_epsilon", float, 1e-5)
        sizes = ("num_heads", "state_size", "n_groups", "conv_kernel", "head_dim")
        fields.without_effect(
            *("chunk_size", "expand", "norm_before_gate", "rescale_prenorm_residual", "residual_in_fp32", "rms_norm"),
            *(f"time_step_{name}" for name in ("floor", "max", "min", "rank")),
        )
        mixer = recurrence(fields, sizes, "use_bias", "use_conv_bias", norm_epsilon=epsilon)
        # There are no networks, whose width is our default.
        unused = {"feedforward_width": DecoderConfig.feedforward_width}
        return decoder(fields, ["mamba2"] * layers, (mixer,), num_heads=h, head_size=p, norm_epsilon=epsilon, **unused)
