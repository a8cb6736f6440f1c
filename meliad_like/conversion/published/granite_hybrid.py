"""Granite 4.0 H, dense (`model_type` granitemoehybrid without experts): Mamba-2, and in some layers full attention."""

from typing import Any

from meliad_like.conversion.published.family import Family, Part, register
from meliad_like.conversion.published.mamba2 import places_of_mamba2, step_limits
from meliad_like.conversion.published.parts import BLOCK, FULL_SPAN, layer_types, linear, rotary, shortest_period
from meliad_like.errors import UserError
from meliad_like.mixers.dot_product_attention import DotProductAttention
from meliad_like.mixers.mamba2 import Mamba2
from meliad_like.models.decoder import DecoderConfig


@register
class GraniteHybridFamily(Family):
    """Residual branches have a factor, which is folded into their last linear maps."""

    model_types = ("granitemoehybrid",)

    def decoder(self, fields):
        if (experts := fields("num_local_experts", int, 8)) != 0:
            raise UserError(f"{fields.owner}: we have no mixtures of experts, and num_local_experts = {experts}")
        layers, d, f, h, mamba_heads, state_size, groups, taps = fields.sizes(
            "num_hidden_layers",
            "hidden_size",
            "shared_intermediate_size",
            "num_attention_heads",
            "mamba_n_heads",
            "mamba_d_state",
            "mamba_n_groups",
            "mamba_d_conv",
        )
        size, expand = fields("mamba_d_head", int | str, "auto"), fields("mamba_expand", int, 2)
        size = expand * d // mamba_heads if size == "auto" else size
        fields.only("hidden_act", "silu", "swish")
        fields.only("position_embedding_type", "rope", "nope")
        positions = rotary(fields)
        if fields.saved.get("position_embedding_type") != "rope":
            positions = {"rotary_share": 0.0}
        fields.without_effect(
            "intermediate_size",
            "mamba_chunk_size",
            "max_position_embeddings",
            "normalization_function",
            "num_experts_per_tok",
            "output_router_logits",
            "router_aux_loss_coef",
        )
        kinds = layer_types(fields, layers, ["recurrent"] * layers)
        epsilon, bias = fields("rms_norm_eps", float, 1e-6), fields("attention_bias", bool, False)
        of_inputs = fields("mamba_proj_bias", bool, False)
        attention = DotProductAttention(
            span=FULL_SPAN,
            num_key_heads=fields("num_key_value_heads", int, h),
            input_bias=bias,
            output_bias=bias,
            scale=fields("attention_multiplier", float, 1.0),
            **positions,
        )
        recurrence = Mamba2(
            num_heads=mamba_heads,
            head_size=size,
            state_size=state_size,
            num_groups=groups,
            conv_length=taps,
            norm_epsilon=epsilon,
            input_bias=of_inputs,
            output_bias=of_inputs,
            conv_bias=fields("mamba_conv_bias", bool, True),
            **step_limits(fields),
        )
        mixers = {"recurrent": ("mamba2", recurrence), "attention": ("dot_product_attention", attention)}
        return DecoderConfig(
            num_layers=layers,
            model_width=d,
            feedforward_width=f,
            num_heads=h,
            head_size=d // h,
            pattern=shortest_period([f"{mixers[kind][0]}+gated_feedforward" for kind in kinds]),
            mixers=tuple(mixers[kind][1] for kind in sorted(set(kinds))),
            embedding_scale=fields("embedding_multiplier", float, 1.0),
            logit_scale=1 / fields("logits_scaling", float, 1.0),
            norm_epsilon=epsilon,
            tied_embedding=fields("tie_word_embeddings", bool, False),
            window_length=BLOCK,
        )

    def places(self, fields, config):
        factor, f = fields("residual_multiplier", float, 1.0), config.feedforward_width
        places: dict[str, Any] = {
            "embedding": Part("model.embed_tokens.weight"),
            "output_embedding": Part("lm_head.weight"),
            "final_norm/scale": Part("model.norm.weight"),
        }
        for i, mixers in enumerate(config.shape.layers):
            ours, theirs = f"layers/{i}/", f"model.layers.{i}."
            network, shared = f"{ours}feedforward/network/", f"{theirs}shared_mlp."
            places |= {
                f"{ours}norm/scale": Part(f"{theirs}input_layernorm.weight"),
                f"{ours}feedforward/norm/scale": Part(f"{theirs}post_attention_layernorm.weight"),
                **linear(f"{network}gate", f"{shared}input_linear", rows=range(f)),
                **linear(f"{network}hidden", f"{shared}input_linear", rows=range(f, 2 * f)),
                **linear(f"{network}output", f"{shared}output_linear", factor),
            }
            if isinstance(mixer := mixers[0], Mamba2):
                width = mixer.width(config.shape)
                places |= places_of_mamba2(mixer, width, f"{ours}mixers/mamba2/", f"{theirs}mamba.")
                places |= linear(f"{ours}output", f"{theirs}mamba.out_proj", factor)
                continue
            for name, tensor in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
                places |= linear(f"{ours}mixers/dot_product_attention/{name}", f"{theirs}self_attn.{tensor}")
            places |= linear(f"{ours}output", f"{theirs}self_attn.o_proj", factor)
        return places
