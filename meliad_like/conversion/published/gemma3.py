"""Gemma 3 (`model_type` gemma3_text): attention to windows, and in every sixth layer full attention; norms around."""

from meliad_like.conversion.published.family import Family
from meliad_like.conversion.published.parts import WINDOWS, attention, layer_types, rotary, stack
from meliad_like.layers.feedforward import GatedFeedForward
from meliad_like.mixers.dot_product_attention import LocalAttention


class Gemma3Family(Family):
    """The language model alone. Only full attention may have a scaling of rotary positions."""

    model_types = ("gemma3_text",)
    norms, norm_offset = ("input_layernorm", "pre_feedforward_layernorm"), 1.0
    second_norms = "post_attention_layernorm", "post_feedforward_layernorm"

    def decoder(self, fields):
        layers, d, g, k = fields.sizes("num_hidden_layers", "hidden_size", "num_key_value_heads", "head_dim")
        fields.only("hidden_activation", "gelu_pytorch_tanh")
        fields.without_effect("cache_implementation")
        epsilon, every = fields("rms_norm_eps", float, 1e-6), fields("sliding_window_pattern", int, 6)
        every = fields("_sliding_window_pattern", int, every)
        settings = {"norm": "head", "norm_epsilon": epsilon, "num_key_heads": g}
        settings |= {"scale": fields("query_pre_attn_scalar", float, 256.0) ** -0.5}
        local, of_full = fields("rope_local_base_freq", float, None), rotary(fields, base=1e6, kind="full_attention")
        of_windows = rotary(fields, kind="sliding_attention") if local is None else {"rotary_base": local}
        span = fields("sliding_window", int, 4096)
        mixers = {
            "full": attention(fields, **settings, **of_full),
            "window": attention(fields, LocalAttention, span=span, **settings, **of_windows),
        }
        default = ["window" if (i + 1) % every else "full" for i in range(layers)]
        return stack(
            fields,
            layer_types(fields, default, WINDOWS),
            mixers,
            tied=True,
            head_size=k,
            feedforwards=(GatedFeedForward(activation="gelu_tanh"),),
            embedding_scale=d**0.5,
            logit_bound=fields("final_logit_softcapping", float, None),
            norms_around=tuple(range(layers)),
            norm_epsilon=epsilon,
        )

    def in_layer(self, fields, config, mixers, ours, theirs):
        places = super().in_layer(fields, config, mixers, ours, theirs)
        for path, norm in zip(("second_norm", "feedforward/second_norm"), self.second_norms):
            places |= self._norm(f"{ours}{path}", f"{theirs}{norm}")
        return places
