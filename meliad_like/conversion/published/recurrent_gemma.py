"""RecurrentGemma (`model_type` recurrent_gemma): the RG-LRU, and in every third layer attention to a window."""

import ml_dtypes
import numpy as np

from meliad_like.conversion.published.family import FILTERS, Family, Part, flat, linear
from meliad_like.conversion.published.parts import attention, rotary, stack
from meliad_like.errors import UserError
from meliad_like.layers.feedforward import GatedFeedForward
from meliad_like.mixers.rg_lru import RGLRU

KINDS = ("recurrent", "attention")


class RecurrentGemmaFamily(Family):
    """The window is as in transformers, with the token itself; in Google's code, with which the published weights
    were trained, a token sees one more: `DotProductAttention.span = 2049`."""

    model_types = ("recurrent_gemma",)
    final_norm = "model.final_norm"
    norms, norm_offset = ("temporal_pre_norm", "channel_pre_norm"), 1.0
    attention, recurrence, network = "temporal_block", "temporal_block", "mlp_block"

    def decoder(self, fields):
        layers, d, f, h = fields.sizes("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
        span, taps = fields.sizes("attention_window_size", "conv1d_width")
        kinds = fields("block_types", list, fields("_block_types", list, ["recurrent", "recurrent", "attention"]))
        if unknown := [kind for kind in kinds if kind not in KINDS]:
            raise UserError(f"{fields.owner}: we can't honour block_types {unknown[0]!r}, only {', '.join(KINDS)}")
        fields.only("head_dim", d // h)
        fields.only("hidden_activation", "gelu_pytorch_tanh")
        fields.without_effect(
            "w_init_variance_scale", "final_w_init_variance_scale", "embeddings_scale_by_sqrt_dim", "sliding_window"
        )
        mixers = {
            "attention": attention(fields, span=span, output_bias=True, **rotary(fields, share=0.5)),
            "recurrent": RGLRU(channels=fields("lru_width", int, d), conv_length=taps),
        }
        return stack(
            fields,
            [kinds[i % len(kinds)] for i in range(layers)],
            mixers,
            tied=True,
            # Half of what the field says.
            feedforward_width=f // 2,
            feedforwards=(GatedFeedForward(activation="gelu_tanh"),),
            feedforward_bias=True,
            embedding_scale=float(np.sqrt(d).astype(ml_dtypes.bfloat16)),
            # Null: no bound.
            logit_bound=fields("logits_soft_cap", float, None if "logits_soft_cap" in fields.saved else 30.0),
            norm_epsilon=fields("rms_norm_eps", float, 1e-6),
        )

    @staticmethod
    def in_recurrence(mixer, shape, ours, theirs):
        path, blocks = f"{ours}mixers/rg_lru/", flat(shape.num_heads)
        return {
            **linear(f"{path}input", f"{theirs}linear_x"),
            **linear(f"{path}gate", f"{theirs}linear_y"),
            f"{path}filters": Part(f"{theirs}conv_1d.weight", FILTERS),
            f"{path}filter_bias": Part(f"{theirs}conv_1d.bias"),
            f"{path}decay": Part(f"{theirs}rg_lru.recurrent_param"),
            f"{path}recurrence_gate/kernel": Part(f"{theirs}rg_lru.recurrent_gate_weight"),
            f"{path}recurrence_gate/bias": Part(f"{theirs}rg_lru.recurrent_gate_bias", blocks),
            f"{path}input_gate/kernel": Part(f"{theirs}rg_lru.input_gate_weight"),
            f"{path}input_gate/bias": Part(f"{theirs}rg_lru.input_gate_bias", blocks),
            **linear(f"{ours}output", f"{theirs}linear_out"),
        }
