"""Falcon-H1 (`model_type` falcon_h1): in every layer Mamba-2 and full attention side by side, and many multipliers."""

from meliad_like.conversion.published.family import Family, gated_network, places_of_attention
from meliad_like.conversion.published.mamba2 import places_of_mamba2, recurrence_of_hybrid
from meliad_like.conversion.published.parts import attention, decoder, rotary
from meliad_like.errors import UserError
from meliad_like.mixers.mamba2 import Mamba2


def factor(fields, name: str) -> float:
    """A field with a constant multiplier."""
    return fields(name, float, 1.0)


def factors(fields, name: str, number: int) -> list[float]:
    """A field with several constant multipliers."""
    values = fields(name, tuple[float, ...], (1.0,) * number)
    if len(values) != number:
        raise UserError(f"{fields.owner}: {name} has {len(values)} numbers, and not {number}")
    return list(values)


class FalconH1Family(Family):
    """The multipliers are folded into linear maps; two are factors of the decoder."""

    model_types = ("falcon_h1",)
    final_norm = "model.final_layernorm"
    norms = "input_layernorm", "pre_ff_layernorm"

    def decoder(self, fields):
        layers, d, h = fields.sizes("num_hidden_layers", "hidden_size", "num_attention_heads")
        # A field of older files, with the only value that there is.
        fields.only("mamba_use_mlp", True)
        fields.without_effect("num_logits_to_keep", "mlp_expansion_factor")
        epsilon, of_network = fields("rms_norm_eps", float, 1e-5), fields("mlp_bias", bool, False)
        full, of_outputs = attention(fields, **rotary(fields)), fields("projectors_bias", bool, False)
        if full.output_bias and of_outputs:
            raise UserError(f"{fields.owner}: we can't honour attention_bias and projectors_bias together")
        before, normed = fields("mamba_norm_before_gate", bool, True), fields("mamba_rms_norm", bool, False)
        mamba = recurrence_of_hybrid(
            fields,
            fields("mamba_d_ssm", int, None),
            norm="none" if not normed else "before_gate" if before else "after_gate",
            norm_epsilon=epsilon,
            output_bias=of_outputs,
        )
        return decoder(
            fields,
            ["dot_product_attention+mamba2+gated_feedforward"] * layers,
            (full, mamba),
            head_size=fields("head_dim", int, d // h),
            feedforward_bias=of_network,
            embedding_scale=factor(fields, "embedding_multiplier"),
            logit_scale=factor(fields, "lm_head_multiplier"),
            norm_epsilon=epsilon,
        )

    def in_layer(self, fields, config, mixers, ours, theirs):
        full, mamba = mixers
        assert isinstance(mamba, Mamba2)
        of_gate, of_network = factors(fields, "mlp_multipliers", 2)
        into_mamba, from_mamba = (factor(fields, f"ssm_{name}_multiplier") for name in ("in", "out"))
        into_attention, from_attention = (factor(fields, f"attention_{name}_multiplier") for name in ("in", "out"))
        of_full = {"of_keys": factor(fields, "key_multiplier"), "of_input": into_attention, "of_output": from_attention}
        of_mamba = {"of_input": into_mamba, "of_output": from_mamba}
        of_parts = factors(fields, "ssm_multipliers", 5)
        both = (
            places_of_attention(full, ours, f"{theirs}self_attn.", **of_full),
            places_of_mamba2(mamba, config.shape, ours, f"{theirs}mamba.", of_parts, **of_mamba),
        )
        output, widths = f"{ours}output/kernel", [mixer.width(config.shape) for mixer in mixers]
        network = f"{ours}feedforward/network/", f"{theirs}feed_forward."
        return {
            **both[0],
            **both[1],
            **gated_network(*network, gate=of_gate, output=of_network),
            output: tuple(places[output]._replace(size=size) for places, size in zip(both, widths)),
            f"{ours}output/bias": both[mamba.output_bias][f"{ours}output/bias"],
        }
