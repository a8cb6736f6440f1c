"""Bamba (`model_type` bamba): Mamba-2, and in some layers full attention with positions on half of a head."""

from meliad_like.conversion.published.family import Family
from meliad_like.conversion.published.mamba2 import places_of_mamba2, recurrence_of_hybrid
from meliad_like.conversion.published.parts import attention, rotary, stack


class BambaFamily(Family):
    model_types = ("bamba",)
    final_norm = "model.final_layernorm"
    norms = "input_layernorm", "pre_ff_layernorm"
    recurrence, network = "mamba", "feed_forward"
    in_recurrence = staticmethod(places_of_mamba2)

    def decoder(self, fields):
        [layers] = fields.sizes("num_hidden_layers")
        fields.without_effect("num_logits_to_keep", "z_loss_coefficient")
        epsilon, full = fields("rms_norm_eps", float, 1e-5), fields("attn_layer_indices", tuple[int, ...], ())
        mixers = {
            "attention": attention(fields, **rotary(fields, share=0.5)),
            "recurrent": recurrence_of_hybrid(fields, norm_epsilon=epsilon),
        }
        kinds = ["attention" if i in full else "recurrent" for i in range(layers)]
        bias = fields("mlp_bias", bool, False)
        return stack(fields, kinds, mixers, feedforward_bias=bias, norm_epsilon=epsilon)
