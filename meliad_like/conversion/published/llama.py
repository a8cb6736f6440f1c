"""Llama and Mistral (`model_type` llama and mistral), which read by windows, or as decoders that carry."""

from meliad_like.conversion.published.family import Family, places_of_attention
from meliad_like.conversion.published.parts import CONSTANTS, FULL_SPAN, attention, rotary, stack
from meliad_like.conversion.published.windows import read_config
from meliad_like.layers.feedforward import GatedFeedForward
from meliad_like.mixers.dot_product_attention import DotProductAttention

MISTRAL_WINDOW = 4096
"""The sliding window of a `mistral` model whose file has no `sliding_window`; one that is null has none."""


class LlamaFamily(Family):
    """A decoder's full attention sees as many tokens as the model has positions, and at most `FULL_SPAN`; Mistral's its
    window."""

    model_types = ("llama", "mistral")

    def name(self, tensor, config):
        return None if tensor.endswith(CONSTANTS) else tensor

    def by_windows(self, fields):
        for bias in ("attention_bias", "mlp_bias"):
            fields.only(bias, False)
        return self._config(fields)

    def decoder(self, fields):
        config = self._config(fields)
        span = config.sliding_window or min(config.max_positions, FULL_SPAN)
        heads, scaling = config.num_key_value_heads, config.rotary_scaling
        positions = {"rotary_base": config.rotary_base, "rotary_scaling": scaling}
        return stack(
            fields,
            ["attention"] * config.num_layers,
            {"attention": attention(fields, span=span, num_key_heads=heads, **positions)},
            model_width=config.model_width,
            feedforward_width=config.feedforward_width,
            num_heads=config.num_heads,
            head_size=config.head_size,
            feedforwards=(GatedFeedForward(config.activation),),
            feedforward_bias=fields("mlp_bias", bool, False),
            norm_epsilon=config.norm_epsilon,
        )

    def _config(self, fields):
        """The config by windows."""
        positions = rotary(fields)
        del positions["rotary_share"]
        if fields.saved["model_type"] == "mistral" and fields.saved.get("sliding_window") is None:
            positions["sliding_window"] = 0 if "sliding_window" in fields.saved else MISTRAL_WINDOW
            fields.without_effect("sliding_window")
        return read_config(fields, **positions)

    def in_layer(self, fields, config, mixers, ours, theirs):
        return places_of_attention(DotProductAttention(), ours, f"{theirs}self_attn.")
