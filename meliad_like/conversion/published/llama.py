"""Llama and Mistral (`model_type` llama and mistral) as decoders that carry, where `RunConfig.model` is "decoder"."""

from meliad_like.conversion.pretrained_formats import CONSTANTS, MISTRAL_WINDOW
from meliad_like.conversion.published.family import Family, register
from meliad_like.conversion.published.parts import FULL_SPAN, attention, places_of_attention, rotary, stack


@register
class LlamaFamily(Family):
    """Full attention sees as many tokens as the model has positions, and at most `FULL_SPAN`; Mistral's its window."""

    model_types = ("llama", "mistral")
    also_by_windows = True

    def name(self, tensor, config):
        return None if tensor.endswith(CONSTANTS) else tensor

    def decoder(self, fields):
        layers, d, f, h, positions = fields.sizes(
            "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings"
        )
        fields.only("hidden_act", "silu", "swish")
        fields.only("pretraining_tp", 1)
        fields.only("rope_interleaved", False)
        span = min(positions, FULL_SPAN)
        if fields.saved["model_type"] == "mistral":
            fields.sizes("num_key_value_heads")
            # Null: none.
            span = fields("sliding_window", int, span if "sliding_window" in fields.saved else MISTRAL_WINDOW)
        return stack(
            fields,
            ["attention"] * layers,
            {"attention": attention(fields, span=span, **rotary(fields))},
            model_width=d,
            feedforward_width=f,
            num_heads=h,
            head_size=fields("head_dim", int, d // h),
            feedforward_bias=fields("mlp_bias", bool, False),
            norm_epsilon=fields("rms_norm_eps", float, 1e-6),
        )

    def in_layer(self, fields, config, mixers, ours, theirs):
        return places_of_attention(mixers[0], ours, f"{theirs}self_attn.")
