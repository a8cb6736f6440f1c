"""OLMo 3 (`model_type` olmo3): attention to windows, and in every fourth layer full attention; norms come last."""

from meliad_like.conversion.published.family import Family
from meliad_like.conversion.published.parts import WINDOWS, attention, layer_types, rotary, stack
from meliad_like.mixers.dot_product_attention import LocalAttention


class Olmo3Family(Family):
    """Only full attention may have a scaling of rotary positions."""

    model_types = ("olmo3",)
    norms = "post_attention_layernorm", "post_feedforward_layernorm"

    def decoder(self, fields):
        [layers] = fields.sizes("num_hidden_layers")
        epsilon, span = fields("rms_norm_eps", float, 1e-5), fields("sliding_window", int, 4096)
        normed = {"norm": "all", "norm_epsilon": epsilon}
        of_windows, of_full = (rotary(fields, base=500_000.0, kind=kind) for kind in WINDOWS)
        mixers = {
            "full": attention(fields, **normed, **of_full),
            "window": attention(fields, LocalAttention, span=span, **normed, **of_windows),
        }
        default = ["full" if i % 4 == 3 else "window" for i in range(layers)]
        kinds, after = layer_types(fields, default, WINDOWS), tuple(range(layers))
        return stack(fields, kinds, mixers, norms_after=after, norm_epsilon=epsilon)
