"""The mapping between parameter names of google-research/meliad and ours.

Only names differ: kernels are [in, out] and heads major in both, and where self- and cross-attention are concatenated
the heads of self-attention come first.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from meliad_like.errors import UserError

_FEEDFORWARD = {
    "hidden/kernel": "tbase/ffn/hidden0/kernel",
    "output/kernel": "tbase/ffn/output_layer/kernel",
}
_HEADS = {
    "key/kernel": "tbase/_kvq/keys_layer/kernel",
    "value/kernel": "tbase/_kvq/values_layer/kernel",
    "query/kernel": "tbase/_kvq/queries_layer/kernel",
    "attention_scale": "tbase/_kvq/attention_scale",
}
# The reference keeps the cross-attention scale outside of `_kvq`.
_READER = {
    "cross_query/kernel": "tbase/_kvq/queries2_layer/kernel",
    "cross_attention_scale": "tbase/attention_scale2",
}
_GATE = {
    "bias": "gate_bias",
    "forget/kernel": "forget_gate/kernel",
    "forget/bias": "forget_gate/bias",
    "input/kernel": "input_gate/kernel",
    "input/bias": "input_gate/bias",
}
_BLOCK = {
    "output/kernel": "tbase/post_attn_mlp/output_layer/kernel",
    "feedforward_norm/scale": "tbase/pre_ffn_layernorm/scale",
    **{f"feedforward/{ours}": theirs for ours, theirs in _FEEDFORWARD.items()},
}
_CELL = {
    "initial": "recurrent_initial_state",
    "identity": "recurrent_tbase/_kvq/position_embeddings",
    "norm/scale": "recurrent_tbase/_kvq/pre_attn_layernorm/scale",
    **{ours: "recurrent_" + theirs for ours, theirs in (_HEADS | _READER | _BLOCK).items()},
    **{f"attention_gate/{ours}": f"recurrent_tbase/post_attn_mlp/{theirs}" for ours, theirs in _GATE.items()},
    **{f"feedforward_gate/{ours}": f"recurrent_tbase/ffn/{theirs}" for ours, theirs in _GATE.items()},
}
# From our names to the reference's, within a layer.
_LAYER = {
    "attention_norm/scale": "tbase/_kvq/pre_attn_layernorm/scale",
    **_BLOCK,
    **{f"heads/{ours}": theirs for ours, theirs in _HEADS.items()},
    "heads/position/by_distance/table": "relative_positions/rel_embedding",
    "mechanisms/external_memory/gate": "external_memory_bias",
    **{f"mechanisms/recurrent_states/{ours}": theirs for ours, theirs in _READER.items()},
    **{f"mechanisms/recurrent_states/cell/{ours}": theirs for ours, theirs in _CELL.items()},
}
_TOP = {"embedding": "embed/embedding", "final_norm/scale": "final_layernorm/scale"}


def meliad_name(path: str) -> str:
    """The reference's name of our parameter, for example of `layers/0/heads/key/kernel`.

    Raises:
        UserError: the reference has no such parameter, because it lacks the mechanism.
    """
    if not (match := re.fullmatch(r"layers/(\d+)/(.+)", path)):
        return _TOP[path]
    if match[2] not in _LAYER:
        raise UserError(f"the reference has no parameter like our {path}: it lacks that mechanism")
    return f"transformer{match[1]}/{_LAYER[match[2]]}"


def from_meliad(theirs: Mapping[str, np.ndarray], template: dict[str, Any]) -> dict[str, Any]:
    """Our parameter tree, filled from the reference's flat parameters.

    Args:
        theirs: the reference's arrays by their names, whose parts are joined by "/".
        template: our parameters or their shapes (`Model.abstract_params`).

    Raises:
        UserError: a parameter is missing, unknown, or of another shape.
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
