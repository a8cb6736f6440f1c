"""Granite 4.0 H, dense (`model_type` granitemoehybrid without experts): Mamba-2, and in some layers full attention."""

from meliad_like.conversion.published.family import Family, linear, places_of_attention
from meliad_like.conversion.published.mamba2 import places_of_mamba2, recurrence_of_hybrid
from meliad_like.conversion.published.parts import attention, layer_types, rotary, stack
from meliad_like.errors import UserError
from meliad_like.mixers.mamba2 import Mamba2


class GraniteHybridFamily(Family):
    """Residual branches have a factor, which is folded into their last linear maps."""

    model_types = ("granitemoehybrid",)

    def decoder(self, fields):
        if (experts := fields("num_local_experts", int, 8)) != 0:
            raise UserError(f"{fields.owner}: we have no mixtures of experts, and num_local_experts = {experts}")
        layers, f = fields.sizes("num_hidden_layers", "shared_intermediate_size")
        fields.only("position_embedding_type", "rope", "nope")
        positions = rotary(fields)
        if fields.saved.get("position_embedding_type") != "rope":
            positions = {"rotary_share": 0.0}
        fields.without_effect(
            *("intermediate_size", "normalization_function", "num_experts_per_tok"),
            *("output_router_logits", "router_aux_loss_coef"),
        )
        epsilon = fields("rms_norm_eps", float, 1e-6)
        mixers = {
            "attention": attention(fields, scale=fields("attention_multiplier", float, 1.0), **positions),
            "recurrent": recurrence_of_hybrid(fields, norm_epsilon=epsilon),
        }
        return stack(
            fields,
            layer_types(fields, ["recurrent"] * layers),
            mixers,
            feedforward_width=f,
            embedding_scale=fields("embedding_multiplier", float, 1.0),
            logit_scale=1 / fields("logits_scaling", float, 1.0),
            norm_epsilon=epsilon,
        )

    def in_layer(self, fields, config, mixers, ours, theirs):
        [mixer] = mixers
        factor, f = fields("residual_multiplier", float, 1.0), config.feedforward_width
        network, shared = f"{ours}feedforward/network/", f"{theirs}shared_mlp."
        places = (
            linear(f"{network}gate", f"{shared}input_linear", rows=range(f))
            | linear(f"{network}hidden", f"{shared}input_linear", rows=range(f, 2 * f))
            | linear(f"{network}output", f"{shared}output_linear", factor)
        )
        if isinstance(mixer, Mamba2):
            return places | places_of_mamba2(mixer, config.shape, ours, f"{theirs}mamba.", of_output=factor)
        return places | places_of_attention(mixer, ours, f"{theirs}self_attn.", of_output=factor)
