"""Nemotron-H without experts (`model_type` nemotron_h): layers of Mamba-2, of attention or of a network alone."""

from meliad_like.conversion.published.family import Family, linear
from meliad_like.conversion.published.mamba2 import places_of_mamba2, recurrence
from meliad_like.conversion.published.parts import attention, decoder
from meliad_like.errors import UserError
from meliad_like.layers.feedforward import PlainFeedForward

LAYERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
"""The names of kinds of layers in newer files, by those in older ones."""
ENTRIES = {
    "linear_attention": "mamba2",
    "mamba": "mamba2",
    "full_attention": "dot_product_attention",
    "attention": "dot_product_attention",
    "mlp": "feedforward",
}


class NemotronHFamily(Family):
    """Steps have the limits of `time_step_limit`, with which the published weights were trained. transformers 5.24
    limits them by `time_step_min` instead (https://github.com/huggingface/transformers/pull/48989)."""

    model_types = ("nemotron_h",)
    embedding, final_norm, layers = "backbone.embeddings", "backbone.norm_f", "backbone.layers"
    norms, attention, recurrence = ("norm", "norm"), "mixer", "mixer"
    in_recurrence = staticmethod(places_of_mamba2)

    def name(self, tensor, config):
        # A head for several tokens ahead.
        return None if tensor.startswith("mtp.") else tensor

    def decoder(self, fields):
        g, k = fields.sizes("num_key_value_heads", "head_dim")
        kinds = fields("layers_block_type", tuple[str, ...], ())
        kinds = kinds or [LAYERS.get(kind, kind) for kind in fields("hybrid_override_pattern", str)]
        if unknown := [kind for kind in kinds if kind not in ENTRIES]:
            raise UserError(f"{fields.owner}: we can't honour layers of {unknown[0]!r}, only {', '.join(ENTRIES)}")
        for name, allowed in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu"), ("sliding_window", None)):
            fields.only(name, allowed)
        fields.only("attention_bias", False)
        fields.without_effect(
            *(name for name in fields.saved if name.startswith(("moe_", "mtp_", "num_nextn_"))),
            *("chunk_size", "expand", "hidden_dropout", "mamba_proj_bias", "mamba_ssm_cache_dtype", "n_group"),
            *("max_position_embeddings", "n_routed_experts", "n_shared_experts", "norm_topk_prob", "num_hidden_layers"),
            *("num_experts_per_tok", "num_logits_to_keep", "rescale_prenorm_residual", "residual_in_fp32"),
            *("routed_scaling_factor", "time_step_floor", "time_step_max", "time_step_min", "topk_group"),
            "use_mamba_kernels",
        )
        epsilon = fields("layer_norm_epsilon", float, 1e-5)
        sizes = ("mamba_num_heads", "ssm_state_size", "n_groups", "conv_kernel", "mamba_head_dim")
        mixers = {
            "dot_product_attention": attention(fields, num_key_heads=g, rotary_share=0.0),
            "mamba2": recurrence(fields, sizes, "use_bias", "use_conv_bias", norm_epsilon=epsilon),
        }
        entries = [ENTRIES[kind] for kind in kinds]
        return decoder(
            fields,
            entries,
            [mixers[entry] for entry in sorted(set(entries)) if entry in mixers],
            head_size=k,
            feedforwards=(PlainFeedForward("squared_relu"),) * ("feedforward" in entries),
            feedforward_bias=fields("mlp_bias", bool, False),
            # As in transformers, whatever the file says.
            tied_embedding=False,
            norm_epsilon=epsilon,
        )

    def in_layer(self, fields, config, mixers, ours, theirs):
        if mixers:
            return super().in_layer(fields, config, mixers, ours, theirs)
        network, theirs = f"{ours}feedforward/network/", f"{theirs}mixer."
        return linear(f"{network}hidden", f"{theirs}up_proj") | linear(f"{network}output", f"{theirs}down_proj")
