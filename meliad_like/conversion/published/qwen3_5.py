"""Qwen3.5, dense (`model_type` qwen3_5 and qwen3_5_text): the gated delta rule, and in some layers full attention."""

from typing import Any

import numpy as np

from meliad_like.conversion.published.family import FILTERS, Family, Part, register
from meliad_like.conversion.published.parts import (
    BLOCK,
    FULL_SPAN,
    gated_network,
    layer_types,
    linear,
    rotary,
    shortest_period,
)
from meliad_like.errors import UserError
from meliad_like.mixers.dot_product_attention import DotProductAttention
from meliad_like.mixers.gated_delta_rule import GatedDeltaRule
from meliad_like.models.decoder import DecoderConfig


@register
class Qwen35Family(Family):
    """Qwen3.5. A model that also sees pictures is opened as its language model alone, and written as qwen3_5_text."""

    model_types = ("qwen3_5", "qwen3_5_text")

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
        layers, d, f, h, g, k, taps, key_size, value_size, key_heads, value_heads = fields.sizes(
            "num_hidden_layers",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "linear_conv_kernel_dim",
            "linear_key_head_dim",
            "linear_value_head_dim",
            "linear_num_key_heads",
            "linear_num_value_heads",
        )
        if value_heads % key_heads:
            raise UserError(f"linear_num_value_heads={value_heads} must be a multiple of {key_heads=}")
        fields.only("hidden_act", "silu", "swish")
        fields.only("attn_output_gate", True)
        fields.only("output_gate_type", "swish", "silu")
        fields.without_effect(
            "mamba_ssm_dtype", "max_position_embeddings", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"
        )
        every = fields("full_attention_interval", int, 4)
        default = ["attention" if (i + 1) % every == 0 else "recurrent" for i in range(layers)]
        kinds = layer_types(fields, layers, default)
        epsilon, bias = fields("rms_norm_eps", float, 1e-6), fields("attention_bias", bool, False)
        attention = DotProductAttention(
            span=FULL_SPAN,
            num_key_heads=g,
            norm="head",
            norm_epsilon=epsilon,
            gate=True,
            input_bias=bias,
            output_bias=bias,
            **rotary(fields, base=10_000_000.0, share=0.25),
        )
        recurrence = GatedDeltaRule(
            num_key_heads=key_heads,
            key_size=key_size,
            values_per_key=value_heads // key_heads,
            value_size=value_size,
            conv_length=taps,
            norm_epsilon=epsilon,
        )
        mixers = {"recurrent": ("gated_delta_rule", recurrence), "attention": ("dot_product_attention", attention)}
        return DecoderConfig(
            num_layers=layers,
            model_width=d,
            feedforward_width=f,
            num_heads=h,
            head_size=k,
            pattern=shortest_period([f"{mixers[kind][0]}+gated_feedforward" for kind in kinds]),
            mixers=tuple(mixers[kind][1] for kind in sorted(set(kinds))),
            logit_scale=1.0,
            norm_epsilon=epsilon,
            tied_embedding=fields("tie_word_embeddings", bool, False),
            window_length=BLOCK,
        )

    def places(self, fields, config):
        places: dict[str, Any] = {
            "embedding": Part("model.embed_tokens.weight"),
            "output_embedding": Part("lm_head.weight"),
            "final_norm/scale": Part("model.norm.weight", offset=1.0),
        }
        h, k = config.num_heads, config.head_size
        # For each head the rows of its queries, then those of its gates.
        rows = np.arange(2 * h * k).reshape(h, 2, k)
        for i, mixers in enumerate(config.shape.layers):
            ours, theirs = f"layers/{i}/", f"model.layers.{i}."
            places |= {
                f"{ours}norm/scale": Part(f"{theirs}input_layernorm.weight", offset=1.0),
                f"{ours}feedforward/norm/scale": Part(f"{theirs}post_attention_layernorm.weight", offset=1.0),
                **gated_network(f"{ours}feedforward/network/", f"{theirs}mlp."),
            }
            if isinstance(mixers[0], DotProductAttention):
                mixer, attention = f"{ours}mixers/dot_product_attention/", f"{theirs}self_attn."
                places |= {
                    **linear(f"{mixer}query", f"{attention}q_proj", rows=rows[:, 0].ravel()),
                    **linear(f"{mixer}gate", f"{attention}q_proj", rows=rows[:, 1].ravel()),
                    **linear(f"{mixer}key", f"{attention}k_proj"),
                    **linear(f"{mixer}value", f"{attention}v_proj"),
                    f"{mixer}query_scale": Part(f"{attention}q_norm.weight", offset=1.0),
                    f"{mixer}key_scale": Part(f"{attention}k_norm.weight", offset=1.0),
                    **linear(f"{ours}output", f"{attention}o_proj"),
                }
            else:
                places |= self.recurrent_places(mixers[0], config, ours, f"{theirs}linear_attn.")
        return places

    def recurrent_places(self, mixer: GatedDeltaRule, config: DecoderConfig, ours: str, theirs: str) -> dict[str, Any]:
        """The places of a recurrent layer's mixer and output."""
        g, h, k, p = mixer.sizes(config.shape)[:4]
        rows = np.split(np.arange(2 * g * k + h * p), [g * k, 2 * g * k])
        mixer_name = f"{ours}mixers/gated_delta_rule/"
        places: dict[str, Any] = {}
        for name, part in zip(("query", "key", "value"), rows):
            places |= linear(f"{mixer_name}{name}", f"{theirs}in_proj_qkv", rows=part)
            places[f"{mixer_name}{name}_filter"] = Part(f"{theirs}conv1d.weight", FILTERS, part)
        for name, tensor in (("gate", "in_proj_z"), ("strength", "in_proj_b"), ("decay", "in_proj_a")):
            places |= linear(f"{mixer_name}{name}", f"{theirs}{tensor}")
        return places | {
            f"{mixer_name}log_rate": Part(f"{theirs}A_log"),
            f"{mixer_name}step_bias": Part(f"{theirs}dt_bias"),
            f"{mixer_name}norm_scale": Part(f"{theirs}norm.weight"),
            **linear(f"{ours}output", f"{theirs}out_proj"),
        }
