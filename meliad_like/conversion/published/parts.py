"""Functions that several families share: places of parameters, positions and kinds of layers."""

from collections.abc import Sequence
from typing import Any

from meliad_like.config import fit
from meliad_like.conversion.pretrained_formats import read_scaling
from meliad_like.conversion.published.family import KERNEL, Fields, Part
from meliad_like.errors import UserError
from meliad_like.layers.rotary import RotaryScaling

BLOCK = 128
"""The default number of tokens of a block, with which documents may begin."""
FULL_SPAN = 8192
"""The default number of tokens that full attention sees: all up to here are cached. Another one is
`DotProductAttention.span`. The positions that a model states (`max_position_embeddings`) have no effect on it."""
MULTIMODAL = ("mrope_section", "mrope_interleaved")
"""Fields of rotary positions of pictures. Positions of text are the usual ones."""


def linear(
    ours: str, theirs: str, factor: float = 1.0, rows: Sequence[int] | None = None, of_input: float = 1.0
) -> dict[str, Part]:
    """The places of a linear map's kernel and bias. `factor` multiplies its results, and `of_input` its input."""
    return {
        f"{ours}/kernel": Part(f"{theirs}.weight", KERNEL, rows, factor * of_input),
        f"{ours}/bias": Part(f"{theirs}.bias", rows=rows, factor=factor),
    }


def gated_network(ours: str, theirs: str, *, gate: float = 1.0, output: float = 1.0) -> dict[str, Part]:
    """The places of a gated network's parameters; `gate` and `output` are factors on their results."""
    return (
        linear(f"{ours}gate", f"{theirs}gate_proj", gate)
        | linear(f"{ours}hidden", f"{theirs}up_proj")
        | linear(f"{ours}output", f"{theirs}down_proj", output)
    )


def rotary(fields: Fields, *, base: float = 10_000.0, share: float = 1.0) -> dict[str, Any]:
    """Fields of our attention for rotary positions, from newer and older fields; what is missing has these values. A
    base that is null means no positions."""
    saved: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        saved |= fields(name, dict, {})
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in fields.saved:
            saved.setdefault(name, fields.saved[name])
        fields.without_effect(name)
    for name in MULTIMODAL:
        saved.pop(name, None)
    theta, share = saved.pop("rope_theta", base), saved.pop("partial_rotary_factor", share)
    if theta is None:
        return {"rotary_share": 0.0}
    owner = f"{fields.owner}: rope_parameters"
    scaling: RotaryScaling = read_scaling(saved, owner)
    numbers = {"rotary_base": theta, "rotary_share": share}
    return {name: fit(value, float, f"{owner}: {name}") for name, value in numbers.items()} | {
        "rotary_scaling": scaling
    }


def shortest_period(kinds: Sequence[str]) -> tuple[str, ...]:
    """The shortest pattern of which the kinds of all layers are repetitions."""
    lengths = (n for n in range(1, len(kinds) + 1) if all(kind == kinds[i % n] for i, kind in enumerate(kinds)))
    return tuple(kinds[: next(lengths)])


def layer_types(fields: Fields, number: int, default: Sequence[str]) -> tuple[str, ...]:
    """The kind of each layer, `recurrent` or `attention`; `default`: the kinds for a config.json without them."""
    kinds = fields("layer_types", list, None)
    if kinds is None:
        return tuple(default)
    if len(kinds) != number:
        raise UserError(f"{fields.owner}: layer_types names {len(kinds)} layers, and there are {number}")
    for kind in kinds:
        if kind not in LAYER_TYPES:
            raise UserError(f"{fields.owner}: we can't honour layer_types {kind!r}, only {', '.join(LAYER_TYPES)}")
    return tuple(LAYER_TYPES[kind] for kind in kinds)


LAYER_TYPES = {
    "linear_attention": "recurrent",
    "mamba": "recurrent",
    "full_attention": "attention",
    "attention": "attention",
}
"""Names of kinds of layers in newer and older files."""
