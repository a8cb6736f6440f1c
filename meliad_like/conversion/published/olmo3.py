"""OLMo 3 (`model_type` olmo3): attention to windows, and in every fourth layer full attention; norms come last."""

from meliad_like.conversion.published.family import Family, register
from meliad_like.conversion.published.parts import attention, layer_types, places_of_attention, rotary, stack
from meliad_like.mixers.dot_product_attention import LocalAttention

KINDS = {"sliding_attention": "window", "full_attention": "full"}


@register
class Olmo3Family(Family):
    """Only full attention may have a scaling of rotary positions."""

    model_types = ("olmo3",)
    norms = "post_attention_layernorm", "post_feedforward_layernorm"

    def decoder(self, fields):
        layers, d, f, h = fields.sizes("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
        fields.only("hidden_act", "silu", "swish")
        epsilon = fields("rms_norm_eps", float, 1e-5)
        normed = {"norm": "all", "norm_epsilon": epsilon}
        of_windows, of_full = (rotary(fields, base=500_000.0, kind=kind) for kind in KINDS)
        mixers = {
            "full": attention(fields, **normed, **of_full),
            "window": attention(
                fields, LocalAttention, span=fields("sliding_window", int, 4096), **normed, **of_windows
            ),
        }
        default = ["full" if i % 4 == 3 else "window" for i in range(layers)]
        return stack(
            fields,
            layer_types(fields, default, KINDS),
            mixers,
            model_width=d,
            feedforward_width=f,
            num_heads=h,
            head_size=d // h,
            norms_after=tuple(range(layers)),
            norm_epsilon=epsilon,
        )

    def in_layer(self, fields, config, mixers, ours, theirs):
        return places_of_attention(mixers[0], ours, f"{theirs}self_attn.")
