"""Bamba (`model_type` bamba): Mamba-2, and in some layers full attention with positions on half of a head."""

from meliad_like.conversion.published.family import Family, places_of_attention
from meliad_like.conversion.published.mamba2 import places_of_mamba2, recurrence_of_hybrid
from meliad_like.conversion.published.parts import attention, rotary, stack
from meliad_like.mixers.mamba2 import Mamba2


class BambaFamily(Family):
    model_types = ("bamba",)
    final_norm = "model.final_layernorm"
    norms = "input_layernorm", "pre_ff_layernorm"
    network = "feed_forward"

    def decoder(self, fields):
        [layers] = fields.sizes("num_hidden_layers")
        fields.without_effect("num_logits_to_keep", "z_loss_coefficient")
        epsilon, full = fields("rms_norm_eps", float, 1e-5), fields("attn_layer_indices", tuple[int, ...], ())
        mixers = {
            "attention": attention(fields, **rotary(fields, share=0.5)),
            "recurrent": recurrence_of_hybrid(fields, norm_epsilon=epsilon),
        }
        kinds, bias = (
            ["attention" if i in full else "recurrent" for i in range(layers)],
            fields("mlp_bias", bool, False),
        )
        return stack(fields, kinds, mixers, feedforward_bias=bias, norm_epsilon=epsilon)

    def in_layer(self, fields, config, mixers, ours, theirs):
        [mixer] = mixers
        if isinstance(mixer, Mamba2):
            return places_of_mamba2(mixer, config.shape, ours, f"{theirs}mamba.")
        return places_of_attention(mixer, ours, f"{theirs}self_attn.")
