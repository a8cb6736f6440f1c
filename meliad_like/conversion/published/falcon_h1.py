"""Falcon-H1 (`model_type` falcon_h1): in every layer Mamba-2 and full attention side by side, and many multipliers."""

from typing import Any

from meliad_like.conversion.published.family import Family, Part, register
from meliad_like.conversion.published.mamba2 import places_of_mamba2, step_limits
from meliad_like.conversion.published.parts import BLOCK, FULL_SPAN, gated_network, linear, rotary
from meliad_like.errors import UserError
from meliad_like.mixers.dot_product_attention import DotProductAttention
from meliad_like.mixers.mamba2 import Mamba2
from meliad_like.models.decoder import DecoderConfig


def factor(fields, name: str) -> float:
    """A field with a constant multiplier."""
    return fields(name, float, 1.0)


def factors(fields, name: str, number: int) -> list[float]:
    """A field with several constant multipliers."""
    values = fields(name, tuple[float, ...], (1.0,) * number)
    if len(values) != number:
        raise UserError(f"{fields.owner}: {name} has {len(values)} numbers, and not {number}")
    return list(values)


@register
class FalconH1Family(Family):
    """The multipliers are folded into linear maps; two are factors of the decoder."""

    model_types = ("falcon_h1",)

    def decoder(self, fields):
        layers, d, f, h, heads, state_size, groups, taps = fields.sizes(
            "num_hidden_layers",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "mamba_n_heads",
            "mamba_d_state",
            "mamba_n_groups",
            "mamba_d_conv",
        )
        width = fields("mamba_d_ssm", int, fields("mamba_expand", int, 2) * d)
        size = fields("mamba_d_head", int | str, "auto")
        size = width // heads if size == "auto" else size
        if size * heads != width:
            raise UserError(f"{fields.owner}: mamba_d_ssm={width} must be {heads} times mamba_d_head={size}")
        fields.only("hidden_act", "silu", "swish")
        # A field of older files, with the only value that there is.
        fields.only("mamba_use_mlp", True)
        fields.without_effect(
            "mamba_chunk_size",
            "mamba_expand",
            "max_position_embeddings",
            "num_logits_to_keep",
            "mlp_expansion_factor",
        )
        epsilon, bias = fields("rms_norm_eps", float, 1e-5), fields("attention_bias", bool, False)
        of_outputs, of_network = fields("projectors_bias", bool, False), fields("mlp_bias", bool, False)
        if bias and of_outputs:
            raise UserError(f"{fields.owner}: we can't honour attention_bias and projectors_bias together")
        before, normed = fields("mamba_norm_before_gate", bool, True), fields("mamba_rms_norm", bool, False)
        attention = DotProductAttention(
            span=FULL_SPAN,
            num_key_heads=fields("num_key_value_heads", int, h),
            input_bias=bias,
            output_bias=bias,
            **rotary(fields),
        )
        recurrence = Mamba2(
            num_heads=heads,
            head_size=size,
            state_size=state_size,
            num_groups=groups,
            conv_length=taps,
            norm="none" if not normed else "before_gate" if before else "after_gate",
            norm_epsilon=epsilon,
            input_bias=fields("mamba_proj_bias", bool, False),
            output_bias=of_outputs,
            conv_bias=fields("mamba_conv_bias", bool, True),
            **step_limits(fields),
        )
        return DecoderConfig(
            num_layers=layers,
            model_width=d,
            feedforward_width=f,
            num_heads=h,
            head_size=fields("head_dim", int, d // h),
            pattern=("dot_product_attention+mamba2+gated_feedforward",),
            mixers=(attention, recurrence),
            feedforward_bias=of_network,
            embedding_scale=factor(fields, "embedding_multiplier"),
            logit_scale=factor(fields, "lm_head_multiplier"),
            norm_epsilon=epsilon,
            tied_embedding=fields("tie_word_embeddings", bool, False),
            window_length=BLOCK,
        )

    def places(self, fields, config):
        attention, recurrence = config.mixers
        assert isinstance(recurrence, Mamba2)
        of_gate, of_network = factors(fields, "mlp_multipliers", 2)
        of_parts = factors(fields, "ssm_multipliers", 5)
        into_mamba, from_mamba = (factor(fields, f"ssm_{name}_multiplier") for name in ("in", "out"))
        into_attention, from_attention = (factor(fields, f"attention_{name}_multiplier") for name in ("in", "out"))
        of_keys = factor(fields, "key_multiplier")
        widths = attention.width(config.shape), recurrence.width(config.shape)
        places: dict[str, Any] = {
            "embedding": Part("model.embed_tokens.weight"),
            "output_embedding": Part("lm_head.weight"),
            "final_norm/scale": Part("model.final_layernorm.weight"),
        }
        for i in range(config.num_layers):
            ours, theirs = f"layers/{i}/", f"model.layers.{i}."
            mixer, mamba = f"{ours}mixers/dot_product_attention/", f"{ours}mixers/mamba2/"
            for name, tensor, value in (("query", "q", 1.0), ("key", "k", of_keys), ("value", "v", 1.0)):
                places |= linear(f"{mixer}{name}", f"{theirs}self_attn.{tensor}_proj", value, of_input=into_attention)
            outputs = (
                linear(f"{ours}output", f"{theirs}self_attn.o_proj", from_attention),
                linear(f"{ours}output", f"{theirs}mamba.out_proj", from_mamba),
            )
            of_bias = outputs[recurrence.output_bias]
            places |= {
                f"{ours}norm/scale": Part(f"{theirs}input_layernorm.weight"),
                f"{ours}feedforward/norm/scale": Part(f"{theirs}pre_ff_layernorm.weight"),
                **gated_network(
                    f"{ours}feedforward/network/", f"{theirs}feed_forward.", gate=of_gate, output=of_network
                ),
                **places_of_mamba2(recurrence, widths[1], mamba, f"{theirs}mamba.", of_parts, into_mamba),
                f"{ours}output/kernel": tuple(
                    places[f"{ours}output/kernel"]._replace(size=size) for places, size in zip(outputs, widths)
                ),
                f"{ours}output/bias": of_bias[f"{ours}output/bias"],
            }
        return places
