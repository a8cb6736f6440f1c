"""Qwen3, dense (`model_type` qwen3): full attention with norms of queries and keys; the last layers may see windows."""

from meliad_like.conversion.published.family import Family
from meliad_like.conversion.published.parts import WINDOWS, attention, layer_types, rotary, stack
from meliad_like.mixers.dot_product_attention import LocalAttention


class Qwen3Family(Family):
    model_types = ("qwen3",)

    def decoder(self, fields):
        [layers] = fields.sizes("num_hidden_layers")
        epsilon, with_windows = fields("rms_norm_eps", float, 1e-6), fields("use_sliding_window", bool, False)
        first, span = fields("max_window_layers", int, 28), fields("sliding_window", int, 4096)
        settings = {"norm": "head", "norm_epsilon": epsilon, **rotary(fields)}
        full = attention(fields, **settings)
        mixers = {"full": full, "window": attention(fields, LocalAttention, span=span, **settings)}
        kinds = layer_types(
            fields, ["window" if with_windows and i >= first else "full" for i in range(layers)], WINDOWS
        )
        return stack(
            fields,
            # Without windows the names of kinds have no effect.
            kinds if with_windows else ["full"] * layers,
            mixers,
            head_size=fields("head_dim", int, 128),
            norm_epsilon=epsilon,
        )
