"""OLMo-Hybrid (`model_type` olmo_hybrid): the gated delta rule, and attention in layers whose norms come last."""

import functools
import re

from meliad_like.conversion.published.family import Family, Part
from meliad_like.conversion.published.parts import attention, layer_types, places_of_delta_rule, rotary, stack
from meliad_like.errors import UserError
from meliad_like.mixers.gated_delta_rule import GatedDeltaRule

RECURRENCE = {
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "gate": "g_proj",
    "strength": "b_proj",
    "decay": "a_proj",
    "norm": "o_norm",
    "output": "o_proj",
}


class OlmoHybridFamily(Family):
    """Tensors are named as transformers 5.24 writes them, which differs from what they are."""

    model_types = ("olmo_hybrid",)
    norms, recurrence = ("attention_layer_norm", "feedforward_layer_norm"), "linear_attn"
    in_recurrence = staticmethod(functools.partial(places_of_delta_rule, names=RECURRENCE))

    def name(self, tensor, config):
        match = re.fullmatch(r"(model\.layers\.(\d+)\.)(input_layernorm|post_attention_layernorm)(\.weight)", tensor)
        if match is None:
            return tensor
        # transformers renames the norm after attention as if it were that before the network.
        new = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}
        return f"{match[1]}{new[match[3]]}{match[4]}"

    def pieces(self, tensor):
        # Three equal parts, whatever the widths of queries, keys and values: as transformers writes them.
        if not tensor.endswith("linear_attn.conv1d.weight"):
            return (tensor,)
        return [tensor.replace("conv1d", f"{name}_conv1d") for name in "qkv"]

    def decoder(self, fields):
        layers, d, h = fields.sizes("num_hidden_layers", "hidden_size", "num_attention_heads")
        key_heads, value_heads = (fields(f"linear_num_{name}_heads", int, h) for name in ("key", "value"))
        if value_heads % key_heads:
            raise UserError(f"linear_num_value_heads={value_heads} must be a multiple of {key_heads=}")
        key_size = fields("linear_key_head_dim", int, int(0.75 * d / key_heads))
        fields.without_effect(
            "linear_a_log_max", "linear_a_log_min", "linear_dt_init_floor", "linear_dt_max", "linear_dt_min"
        )
        default = ["attention" if i % 4 == 3 else "recurrent" for i in range(layers)]
        kinds = layer_types(fields, default if layers > 3 else [*default[:-1], "attention"])
        epsilon = fields("rms_norm_eps", float, 1e-6)
        mixers = {
            "attention": attention(fields, norm="all", norm_epsilon=epsilon, **rotary(fields)),
            "recurrent": GatedDeltaRule(
                num_key_heads=key_heads,
                key_size=key_size,
                values_per_key=value_heads // key_heads,
                value_size=fields("linear_value_head_dim", int, 2 * key_size),
                conv_length=fields("linear_conv_kernel_dim", int, 4),
                largest_strength=2.0 if fields("linear_allow_neg_eigval", bool, True) else 1.0,
                norm_epsilon=1e-5,
            ),
        }
        return stack(
            fields,
            kinds,
            mixers,
            norms_after=tuple(i for i, kind in enumerate(kinds) if kind == "attention"),
            norm_epsilon=epsilon,
        )

    def in_layer(self, fields, config, mixers, ours, theirs):
        places = super().in_layer(fields, config, mixers, ours, theirs)
        if isinstance(mixers[0], GatedDeltaRule):
            return places
        return places | {
            f"{ours}norm/scale": Part(f"{theirs}feedforward_layer_norm.weight"),
            f"{ours}feedforward/norm/scale": Part(f"{theirs}post_feedforward_layernorm.weight"),
        }
