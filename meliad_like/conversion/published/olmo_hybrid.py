"""OLMo-Hybrid (`model_type` olmo_hybrid): the gated delta rule, and attention in layers whose norms come last."""

import re
from typing import Any

from meliad_like.conversion.published.family import FILTERS, Family, Part, register
from meliad_like.conversion.published.parts import (
    BLOCK,
    FULL_SPAN,
    gated_network,
    layer_types,
    linear,
    rotary,
    shortest_period,
)
from meliad_like.errors import UserError
from meliad_like.mixers.dot_product_attention import DotProductAttention
from meliad_like.mixers.gated_delta_rule import GatedDeltaRule
from meliad_like.models.decoder import DecoderConfig

CONVOLUTION = "linear_attn.conv1d.weight"


@register
class OlmoHybridFamily(Family):
    """Tensors are named as transformers 5.24 writes them, which differs from what they are."""

    model_types = ("olmo_hybrid",)

    def name(self, tensor, config):
        match = re.fullmatch(r"(model\.layers\.(\d+)\.)(input_layernorm|post_attention_layernorm)(\.weight)", tensor)
        if match is None:
            return tensor
        # transformers renames the norm after attention as if it were that before the network.
        new = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}
        return f"{match[1]}{new[match[3]]}{match[4]}"

    def pieces(self, tensor):
        # Three equal parts, whatever the widths of queries, keys and values: as transformers writes them.
        if not tensor.endswith(CONVOLUTION):
            return (tensor,)
        return [tensor.replace("conv1d", f"{name}_conv1d") for name in "qkv"]

    def decoder(self, fields):
        layers, d, f, h = fields.sizes("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
        key_heads, value_heads = (fields(f"linear_num_{name}_heads", int, h) for name in ("key", "value"))
        if value_heads % key_heads:
            raise UserError(f"linear_num_value_heads={value_heads} must be a multiple of {key_heads=}")
        key_size = fields("linear_key_head_dim", int, int(0.75 * d / key_heads))
        fields.only("hidden_act", "silu", "swish")
        fields.without_effect(
            "linear_a_log_max",
            "linear_a_log_min",
            "linear_dt_init_floor",
            "linear_dt_max",
            "linear_dt_min",
            "max_position_embeddings",
        )
        default = ["attention" if i % 4 == 3 else "recurrent" for i in range(layers)]
        kinds = layer_types(fields, layers, default if layers > 3 else [*default[:-1], "attention"])
        epsilon, bias = fields("rms_norm_eps", float, 1e-6), fields("attention_bias", bool, False)
        attention = DotProductAttention(
            span=FULL_SPAN,
            num_key_heads=fields("num_key_value_heads", int, h),
            norm="all",
            norm_epsilon=epsilon,
            input_bias=bias,
            output_bias=bias,
            **rotary(fields),
        )
        recurrence = GatedDeltaRule(
            num_key_heads=key_heads,
            key_size=key_size,
            values_per_key=value_heads // key_heads,
            value_size=fields("linear_value_head_dim", int, 2 * key_size),
            conv_length=fields("linear_conv_kernel_dim", int, 4),
            largest_strength=2.0 if fields("linear_allow_neg_eigval", bool, True) else 1.0,
            norm_epsilon=1e-5,
        )
        mixers = {"recurrent": ("gated_delta_rule", recurrence), "attention": ("dot_product_attention", attention)}
        after = tuple(i for i, kind in enumerate(kinds) if kind == "attention")
        return DecoderConfig(
            num_layers=layers,
            model_width=d,
            feedforward_width=f,
            num_heads=h,
            head_size=d // h,
            pattern=shortest_period([f"{mixers[kind][0]}+gated_feedforward" for kind in kinds]),
            mixers=tuple(mixers[kind][1] for kind in sorted(set(kinds))),
            norms_after=after,
            logit_scale=1.0,
            norm_epsilon=epsilon,
            tied_embedding=fields("tie_word_embeddings", bool, False),
            window_length=BLOCK,
        )

    def places(self, fields, config):
        places: dict[str, Any] = {
            "embedding": Part("model.embed_tokens.weight"),
            "output_embedding": Part("lm_head.weight"),
            "final_norm/scale": Part("model.norm.weight"),
        }
        for i, mixers in enumerate(config.shape.layers):
            ours, theirs = f"layers/{i}/", f"model.layers.{i}."
            places |= gated_network(f"{ours}feedforward/network/", f"{theirs}mlp.")
            if isinstance(mixers[0], DotProductAttention):
                mixer, attention = f"{ours}mixers/dot_product_attention/", f"{theirs}self_attn."
                for name, tensor in (("query", "q"), ("key", "k"), ("value", "v")):
                    places |= linear(f"{mixer}{name}", f"{attention}{tensor}_proj")
                places |= {
                    f"{mixer}query_scale": Part(f"{attention}q_norm.weight"),
                    f"{mixer}key_scale": Part(f"{attention}k_norm.weight"),
                    **linear(f"{ours}output", f"{attention}o_proj"),
                    f"{ours}norm/scale": Part(f"{theirs}feedforward_layer_norm.weight"),
                    f"{ours}feedforward/norm/scale": Part(f"{theirs}post_feedforward_layernorm.weight"),
                }
                continue
            recurrence = mixers[0]
            assert isinstance(recurrence, GatedDeltaRule)
            g, h, k, p = recurrence.sizes(config.shape)[:4]
            mixer, attention = f"{ours}mixers/gated_delta_rule/", f"{theirs}linear_attn."
            first = 0
            for name, size in (("query", g * k), ("key", g * k), ("value", h * p)):
                places |= linear(f"{mixer}{name}", f"{attention}{name[0]}_proj")
                rows = range(first, first + size)
                places[f"{mixer}{name}_filter"] = Part(f"{theirs}{CONVOLUTION}", FILTERS, rows)
                first += size
            for name, tensor in (("gate", "g_proj"), ("strength", "b_proj"), ("decay", "a_proj")):
                places |= linear(f"{mixer}{name}", f"{attention}{tensor}")
            places |= {
                f"{mixer}log_rate": Part(f"{attention}A_log"),
                f"{mixer}step_bias": Part(f"{attention}dt_bias"),
                f"{mixer}norm_scale": Part(f"{attention}o_norm.weight"),
                **linear(f"{ours}output", f"{attention}o_proj"),
                f"{ours}norm/scale": Part(f"{theirs}attention_layer_norm.weight"),
                f"{ours}feedforward/norm/scale": Part(f"{theirs}feedforward_layer_norm.weight"),
            }
        return places
