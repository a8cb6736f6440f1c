"""The parameter names of google-research/meliad, and ours.

Only names differ: kernels are [in, out] and heads major in both, and where self- and cross-attention are concatenated
the heads of self-attention come first.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from meliad_like.errors import UserError

# Ours to theirs, within a layer. Theirs keeps the cross-attention scale outside of `_kvq`.
_TOKENS = {
    "attention_norm/scale": "tbase/_kvq/pre_attn_layernorm/scale",
    "key/kernel": "tbase/_kvq/keys_layer/kernel",
    "value/kernel": "tbase/_kvq/values_layer/kernel",
    "query/kernel": "tbase/_kvq/queries_layer/kernel",
    "cross_query/kernel": "tbase/_kvq/queries2_layer/kernel",
    "attention_scale": "tbase/_kvq/attention_scale",
    "cross_attention_scale": "tbase/attention_scale2",
    "output/kernel": "tbase/post_attn_mlp/output_layer/kernel",
    "feedforward_norm/scale": "tbase/pre_ffn_layernorm/scale",
    "feedforward/hidden/kernel": "tbase/ffn/hidden0/kernel",
    "feedforward/output/kernel": "tbase/ffn/output_layer/kernel",
    "position_bias/table": "relative_positions/rel_embedding",
}
_GATE = {
    "bias": "gate_bias",
    "forget/kernel": "forget_gate/kernel",
    "forget/bias": "forget_gate/bias",
    "input/kernel": "input_gate/kernel",
    "input/bias": "input_gate/bias",
}
_CELL = {
    "initial": "recurrent_initial_state",
    "identity": "recurrent_tbase/_kvq/position_embeddings",
    "norm/scale": "recurrent_tbase/_kvq/pre_attn_layernorm/scale",
    **{
        ours: "recurrent_" + theirs
        for ours, theirs in _TOKENS.items()
        if not ours.startswith(("attention_norm", "position_bias"))
    },
    **{f"attention_gate/{ours}": f"recurrent_tbase/post_attn_mlp/{theirs}" for ours, theirs in _GATE.items()},
    **{f"feedforward_gate/{ours}": f"recurrent_tbase/ffn/{theirs}" for ours, theirs in _GATE.items()},
}
_LAYER = {
    **_TOKENS,
    "memory_gate": "external_memory_bias",
    **{f"cell/{ours}": theirs for ours, theirs in _CELL.items()},
}
_TOP = {"embedding": "embed/embedding", "final_norm/scale": "final_layernorm/scale"}


def meliad_name(path: str) -> str:
    """The reference's name of our parameter, for example `layers/0/key/kernel`."""
    if match := re.fullmatch(r"layers/(\d+)/(.+)", path):
        return f"transformer{match[1]}/{_LAYER[match[2]]}"
    return _TOP[path]


def from_meliad(theirs: Mapping[str, np.ndarray], template: dict[str, Any]) -> dict[str, Any]:
    """Our parameter tree, filled from the reference's flat parameters.

    Args:
        theirs: arrays by their names, parts joined by "/".
        template: our parameters or their shapes (`Model.abstract_params`).

    Raises:
        UserError: a parameter is missing, left over, or of another shape.
    """
    left_over = set(theirs)

    def fill(path: str, leaf):
        name = meliad_name(path)
        if name not in theirs:
            raise UserError(f"the checkpoint has no parameter {name} (our {path}); is this its configuration?")
        if theirs[name].shape != leaf.shape:
            raise UserError(
                f"{name} has shape {theirs[name].shape} in the checkpoint, {leaf.shape} in the configuration"
            )
        left_over.discard(name)
        return np.asarray(theirs[name], leaf.dtype)

    params = _map_with_path(fill, template)
    if left_over:
        raise UserError(f"the configuration has no place for {sorted(left_over)[0]} ({len(left_over)} such parameters)")
    return params


def to_meliad(params: dict[str, Any]) -> dict[str, np.ndarray]:
    """The reference's flat parameters from ours; the inverse of `from_meliad`."""
    theirs = {}
    _map_with_path(lambda path, leaf: theirs.__setitem__(meliad_name(path), np.asarray(leaf)), params)
    return theirs


def _map_with_path(function, tree, path=""):
    if not isinstance(tree, dict):
        return function(path, tree)
    return {
        name: _map_with_path(function, value, f"{path}/{name}" if path else str(name)) for name, value in tree.items()
    }
