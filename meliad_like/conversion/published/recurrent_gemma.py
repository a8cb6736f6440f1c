"""RecurrentGemma (`model_type` recurrent_gemma): the RG-LRU, and in every third layer attention to a window."""

from typing import Any

import ml_dtypes
import numpy as np

from meliad_like.conversion.published.family import FILTERS, Family, Part, flat, register
from meliad_like.conversion.published.parts import BLOCK, gated_network, linear, rotary
from meliad_like.errors import UserError
from meliad_like.layers.feedforward import GatedFeedForward
from meliad_like.mixers.dot_product_attention import DotProductAttention
from meliad_like.mixers.rg_lru import RGLRU
from meliad_like.models.decoder import DecoderConfig

MIXERS = {"recurrent": "rg_lru", "attention": "dot_product_attention"}


@register
class RecurrentGemmaFamily(Family):
    """The window is as in transformers, with the token itself; in Google's code, with which the published weights
    were trained, a token sees one more: `DotProductAttention.span = 2049`."""

    model_types = ("recurrent_gemma",)

    def decoder(self, fields):
        layers, d, f, h, span, taps = fields.sizes(
            "num_hidden_layers",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "attention_window_size",
            "conv1d_width",
        )
        kinds = fields("block_types", list, fields("_block_types", list, ["recurrent", "recurrent", "attention"]))
        if unknown := [kind for kind in kinds if kind not in MIXERS]:
            raise UserError(f"{fields.owner}: we can't honour block_types {unknown[0]!r}, only {', '.join(MIXERS)}")
        fields.only("head_dim", d // h)
        fields.only("hidden_activation", "gelu_pytorch_tanh")
        fields.without_effect(
            "w_init_variance_scale", "final_w_init_variance_scale", "embeddings_scale_by_sqrt_dim", "sliding_window"
        )
        attention = DotProductAttention(
            span=span,
            num_key_heads=fields("num_key_value_heads", int, h),
            input_bias=fields("attention_bias", bool, False),
            output_bias=True,
            **rotary(fields, share=0.5),
        )
        recurrence = RGLRU(channels=fields("lru_width", int, d), conv_length=taps)
        mixers = {"recurrent": recurrence, "attention": attention}
        used = kinds[:layers]
        return DecoderConfig(
            num_layers=layers,
            model_width=d,
            # Half of what the field says.
            feedforward_width=f // 2,
            num_heads=h,
            head_size=d // h,
            pattern=tuple(f"{MIXERS[kind]}+gated_feedforward" for kind in used),
            mixers=tuple(mixers[kind] for kind in sorted(set(used))),
            feedforwards=(GatedFeedForward(activation="gelu_tanh"),),
            feedforward_bias=True,
            embedding_scale=float(np.sqrt(d).astype(ml_dtypes.bfloat16)),
            logit_scale=1.0,
            # Null: no bound.
            logit_bound=fields("logits_soft_cap", float, None if "logits_soft_cap" in fields.saved else 30.0),
            norm_epsilon=fields("rms_norm_eps", float, 1e-6),
            tied_embedding=fields("tie_word_embeddings", bool, True),
            window_length=BLOCK,
        )

    def places(self, fields, config):
        places: dict[str, Any] = {
            "embedding": Part("model.embed_tokens.weight"),
            "output_embedding": Part("lm_head.weight"),
            "final_norm/scale": Part("model.final_norm.weight", offset=1.0),
        }
        blocks = flat(config.num_heads)
        for i, mixers in enumerate(config.shape.layers):
            ours, theirs = f"layers/{i}/", f"model.layers.{i}."
            mixer, block = f"{ours}mixers/{MIXERS['recurrent']}/", f"{theirs}temporal_block."
            places |= {
                f"{ours}norm/scale": Part(f"{theirs}temporal_pre_norm.weight", offset=1.0),
                f"{ours}feedforward/norm/scale": Part(f"{theirs}channel_pre_norm.weight", offset=1.0),
                **gated_network(f"{ours}feedforward/network/", f"{theirs}mlp_block."),
            }
            if isinstance(mixers[0], DotProductAttention):
                mixer = f"{ours}mixers/{MIXERS['attention']}/"
                for name, tensor in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj")):
                    places |= linear(f"{mixer}{name}", f"{block}{tensor}")
                places |= linear(f"{ours}output", f"{block}o_proj")
                continue
            places |= {
                **linear(f"{mixer}input", f"{block}linear_x"),
                **linear(f"{mixer}gate", f"{block}linear_y"),
                f"{mixer}filters": Part(f"{block}conv_1d.weight", FILTERS),
                f"{mixer}filter_bias": Part(f"{block}conv_1d.bias"),
                f"{mixer}decay": Part(f"{block}rg_lru.recurrent_param"),
                f"{mixer}recurrence_gate/kernel": Part(f"{block}rg_lru.recurrent_gate_weight"),
                f"{mixer}recurrence_gate/bias": Part(f"{block}rg_lru.recurrent_gate_bias", blocks),
                f"{mixer}input_gate/kernel": Part(f"{block}rg_lru.input_gate_weight"),
                f"{mixer}input_gate/bias": Part(f"{block}rg_lru.input_gate_bias", blocks),
                **linear(f"{ours}output", f"{block}linear_out"),
            }
        return places
