"""Mamba-2 (`model_type` mamba2), as Mamba-Codestral-7B and state-spaces/mamba2-* in the form of transformers."""

import math
from collections.abc import Sequence
from typing import Any

from meliad_like.conversion.published.family import FILTERS, Family, Fields, Part, linear, number, register
from meliad_like.conversion.published.parts import BLOCK
from meliad_like.errors import UserError
from meliad_like.mixers.base import DecoderShape
from meliad_like.mixers.mamba2 import Mamba2
from meliad_like.models.decoder import DecoderConfig


def step_limits(fields: Fields) -> dict[str, float | None]:
    """The smallest and the largest step, as fields of our mixer."""
    smallest, largest = (number(x) for x in fields("time_step_limit", list, [0.0, math.inf]))
    return {"min_step": smallest, "max_step": None if largest == math.inf else largest}


def recurrence(fields: Fields, width: int | None = None, **others: Any) -> Mamba2:
    """The mixer by the fields of hybrid models, which begin with `mamba_`, and by these of our config. `width` is that
    of the values, if a field says it."""
    d, heads, state_size, groups, taps = fields.sizes(
        "hidden_size", "mamba_n_heads", "mamba_d_state", "mamba_n_groups", "mamba_d_conv"
    )
    expanded, size, bias = (
        fields("mamba_expand", int, 2) * d,
        fields("mamba_d_head", int | str, "auto"),
        fields("mamba_proj_bias", bool, False),
    )
    width = expanded if width is None else width
    size = width // heads if size == "auto" else size
    if size * heads != width:
        raise UserError(f"{fields.owner}: the width of Mamba-2, {width}, must be {heads} times mamba_d_head={size}")
    fields.without_effect("mamba_chunk_size")
    usual = {"input_bias": bias, "output_bias": bias, "conv_bias": fields("mamba_conv_bias", bool, True)}
    sizes = {"num_heads": heads, "head_size": size, "state_size": state_size, "num_groups": groups}
    return Mamba2(**sizes, conv_length=taps, **usual | step_limits(fields) | others)


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
    names, sizes = (
        ("gate", "value", "key", "query", "step_size"),
        (width, width, of_groups, of_groups, width // mixer.head_size),
    )
    places: dict[str, Any] = linear(f"{ours}output", f"{theirs}out_proj", of_output)
    first = 0
    for name, size, factor in zip(names, sizes, factors, strict=True):
        places |= linear(f"{path}{name}", f"{theirs}in_proj", factor, range(first, first + size), of_input)
        first += size
    return places | {
        f"{path}filters": Part(f"{theirs}conv1d.weight", FILTERS),
        f"{path}filter_bias": Part(f"{theirs}conv1d.bias"),
        f"{path}log_rate": Part(f"{theirs}A_log"),
        f"{path}step_bias": Part(f"{theirs}dt_bias"),
        f"{path}skip": Part(f"{theirs}D"),
        f"{path}norm_scale": Part(f"{theirs}norm.weight"),
    }


@register
class Mamba2Family(Family):
    """Layers of Mamba-2 alone."""

    model_types = ("mamba2",)
    embedding, final_norm, layers = "backbone.embeddings", "backbone.norm_f", "backbone.layers"
    norms = ("norm",)

    def name(self, tensor, config):
        # Older files.
        return tensor.replace("backbone.embedding.", "backbone.embeddings.")

    def decoder(self, fields):
        layers, d, h, p, n, groups, taps = fields.sizes(
            "num_hidden_layers", "hidden_size", "num_heads", "head_dim", "state_size", "n_groups", "conv_kernel"
        )
        epsilon, bias = fields("layer_norm_epsilon", float, 1e-5), fields("use_bias", bool, False)
        fields.only("hidden_act", "silu", "swish")
        fields.without_effect(
            "chunk_size",
            "expand",
            "norm_before_gate",
            "rescale_prenorm_residual",
            "residual_in_fp32",
            "rms_norm",
            "time_step_floor",
            "time_step_max",
            "time_step_min",
            "time_step_rank",
        )
        mixer = Mamba2(
            num_heads=h,
            head_size=p,
            state_size=n,
            num_groups=groups,
            conv_length=taps,
            norm_epsilon=epsilon,
            input_bias=bias,
            output_bias=bias,
            conv_bias=fields("use_conv_bias", bool, True),
            **step_limits(fields),
        )
        return DecoderConfig(
            num_layers=layers,
            model_width=d,
            num_heads=h,
            head_size=p,
            pattern=("mamba2",),
            mixers=(mixer,),
            logit_scale=1.0,
            norm_epsilon=epsilon,
            tied_embedding=fields("tie_word_embeddings", bool, False),
            window_length=BLOCK,
        )

    def in_layer(self, fields, config, mixers, ours, theirs):
        return places_of_mamba2(mixers[0], config.shape, ours, f"{theirs}mixer.")
