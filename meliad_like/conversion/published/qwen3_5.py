"""Qwen3.5, dense (`model_type` qwen3_5 and qwen3_5_text): the gated delta rule, and in some layers full attention."""

import functools

import numpy as np

from meliad_like.conversion.published.family import Family, linear
from meliad_like.conversion.published.parts import attention, layer_types, places_of_delta_rule, rotary, stack
from meliad_like.errors import UserError
from meliad_like.mixers.gated_delta_rule import GatedDeltaRule

RECURRENCE = dict.fromkeys(("query", "key", "value"), "in_proj_qkv") | {
    "gate": "in_proj_z",
    "strength": "in_proj_b",
    "decay": "in_proj_a",
    "norm": "norm",
    "output": "out_proj",
}


class Qwen35Family(Family):
    """Qwen3.5. A model that also sees pictures is opened as its language model alone, and written as qwen3_5_text."""

    model_types = ("qwen3_5", "qwen3_5_text")
    norm_offset, recurrence = 1.0, "linear_attn"
    in_recurrence = staticmethod(functools.partial(places_of_delta_rule, names=RECURRENCE))

    def normal_form(self, saved, owner):
        if saved["model_type"] == "qwen3_5_text":
            return saved
        if not isinstance(text := saved.get("text_config"), dict):
            raise UserError(f"{owner} has no text_config")
        text = {"tie_word_embeddings": saved.get("tie_word_embeddings", False)} | text
        return text | {"model_type": "qwen3_5_text", "architectures": ["Qwen3_5ForCausalLM"]}

    def name(self, tensor, config):
        if tensor.startswith(("model.visual.", "mtp.")):
            return None
        return tensor.replace("model.language_model.", "model.")

    def decoder(self, fields):
        layers, g, k = fields.sizes("num_hidden_layers", "num_key_value_heads", "head_dim")
        names = ("conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads")
        taps, key_size, value_size, key_heads, value_heads = fields.sizes(*(f"linear_{name}" for name in names))
        if value_heads % key_heads:
            raise UserError(f"linear_num_value_heads={value_heads} must be a multiple of {key_heads=}")
        fields.only("attn_output_gate", True)
        fields.only("output_gate_type", "swish", "silu")
        fields.without_effect("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
        every, epsilon = fields("full_attention_interval", int, 4), fields("rms_norm_eps", float, 1e-6)
        default = ["attention" if (i + 1) % every == 0 else "recurrent" for i in range(layers)]
        positions = rotary(fields, share=0.25)
        mixers = {
            "attention": attention(fields, num_key_heads=g, norm="head", norm_epsilon=epsilon, gate=True, **positions),
            "recurrent": GatedDeltaRule(
                num_key_heads=key_heads,
                key_size=key_size,
                values_per_key=value_heads // key_heads,
                value_size=value_size,
                conv_length=taps,
                norm_epsilon=epsilon,
            ),
        }
        return stack(fields, layer_types(fields, default), mixers, head_size=k, norm_epsilon=epsilon)

    def in_layer(self, fields, config, mixers, ours, theirs):
        places = super().in_layer(fields, config, mixers, ours, theirs)
        if isinstance(mixers[0], GatedDeltaRule):
            return places
        path, module = f"{ours}mixers/dot_product_attention/", f"{theirs}self_attn."
        # For each head the rows of its queries, then those of its gates.
        rows = np.arange(2 * config.shape.inner_width).reshape(config.num_heads, 2, -1)
        return (
            places
            | linear(f"{path}query", f"{module}q_proj", rows=rows[:, 0].ravel())
            | linear(f"{path}gate", f"{module}q_proj", rows=rows[:, 1].ravel())
        )
