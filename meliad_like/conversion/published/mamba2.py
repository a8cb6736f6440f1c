"""Mamba-2 (`model_type` mamba2), as Mamba-Codestral-7B and state-spaces/mamba2-* in the form of transformers."""

import math
from collections.abc import Sequence
from typing import Any

from meliad_like.conversion.published.family import FILTERS, Family, Fields, Part, number, register
from meliad_like.conversion.published.parts import BLOCK, linear
from meliad_like.mixers.mamba2 import Mamba2
from meliad_like.models.decoder import DecoderConfig


def step_limits(fields: Fields) -> dict[str, float | None]:
    """The smallest and the largest step, as fields of our mixer."""
    smallest, largest = (number(x) for x in fields("time_step_limit", list, [0.0, math.inf]))
    return {"min_step": smallest, "max_step": None if largest == math.inf else largest}


def places_of_mamba2(
    mixer: Mamba2, width: int, ours: str, theirs: str, factors: Sequence[float] = (1.0,) * 5, of_input: float = 1.0
) -> dict[str, Any]:
    """The places of the parameters of a mixer, whose values have this width. `ours` and `theirs` are the beginnings of
    names; the factors are those of the results of the input projection, gates, values, keys, queries and steps, and
    of its input."""
    of_groups, h = mixer.of_groups, width // mixer.head_size
    names, sizes = ("gate", "value", "key", "query", "step_size"), (width, width, of_groups, of_groups, h)
    places: dict[str, Any] = {}
    first = 0
    for name, size, factor in zip(names, sizes, factors, strict=True):
        rows = range(first, first + size)
        places |= linear(f"{ours}{name}", f"{theirs}in_proj", factor, rows, of_input)
        first += size
    return places | {
        f"{ours}filters": Part(f"{theirs}conv1d.weight", FILTERS),
        f"{ours}filter_bias": Part(f"{theirs}conv1d.bias"),
        f"{ours}log_rate": Part(f"{theirs}A_log"),
        f"{ours}step_bias": Part(f"{theirs}dt_bias"),
        f"{ours}skip": Part(f"{theirs}D"),
        f"{ours}norm_scale": Part(f"{theirs}norm.weight"),
    }


@register
class Mamba2Family(Family):
    """Layers of Mamba-2 alone."""

    model_types = ("mamba2",)

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

    def places(self, fields, config):
        [mixer] = config.mixers
        places: dict[str, Any] = {
            "embedding": Part("backbone.embeddings.weight"),
            "output_embedding": Part("lm_head.weight"),
            "final_norm/scale": Part("backbone.norm_f.weight"),
        }
        for i in range(config.num_layers):
            ours, theirs = f"layers/{i}/", f"backbone.layers.{i}."
            places |= {
                f"{ours}norm/scale": Part(f"{theirs}norm.weight"),
                **linear(f"{ours}output", f"{theirs}mixer.out_proj"),
                **places_of_mamba2(mixer, mixer.width(config.shape), f"{ours}mixers/mamba2/", f"{theirs}mixer."),
            }
        return places
