"""Converts every configuration of a checkout of google-research/meliad, and compares the numbers of parameters.

    python benchmarks/meliad_gin.py --configs=meliad/transformer/configs --output=meliad_gin.csv

Most of their files are parts, which are converted together with a base. The reference's numbers are computed from its
bindings by the shapes that its modules have (commit cc1aef5), and not from our model.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd
from absl import app, flags

from meliad_like.config import parse
from meliad_like.conversion.meliad_gin import read_bindings, recipe_of
from meliad_like.errors import UserError
from meliad_like.models.model import Model

CONFIGS = flags.DEFINE_string("configs", None, "Their folder transformer/configs.", required=True)
OUTPUT = flags.DEFINE_string("output", None, "The table, a CSV file.", required=True)

# The files that come before a part, by the beginning of its name; the first match counts.
BEFORE = {
    "base_": (),
    "memory2/": ("base_memory2.gin",),
    "size/small_test_blort": ("base_memory.gin",),
    "size/small_test": ("base_memory2.gin",),
    "size/tiny_test": ("base_memory2.gin",),
    "memory": ("base_memory.gin",),
    "options/external_memory": ("base_memory.gin",),
    "options/final_mlp": ("base_memory.gin",),
    "options/enable_scan": ("base_memory.gin",),
    "options/positions_absolute": ("base_memory.gin",),
    "options/stack_window": ("base_memory.gin",),
    "options/seq_512_nocache": ("base_memory.gin",),
    "options/window": ("base_transformer.gin", "options/seq_4096.gin"),
    "recurrent/bias_": ("base_memory.gin",),
    "recurrent/lstm_": ("base_memory.gin",),
    "recurrent/": ("base_memory.gin", "recurrent/bias_skip.gin"),
    "": ("base_transformer.gin",),
}


def reference_parameters(theirs: dict[str, Any]) -> tuple[int, int]:
    """The number of the reference's parameters, and of those among them that nothing reads."""

    def get(name: str, default: Any = None) -> Any:
        values = [value for key, value in theirs.items() if key.rpartition("/")[2] == name]
        return values[-1] if values else default

    melodi = get("MelodiStack.summary_size") is not None
    layer = "MelodiSequenceLayer" if melodi else "TransformerLayer"
    h, k, w = (get(f"{layer}.{name}") for name in ("num_heads", "head_size", "window_length"))
    f = get(f"{layer}.mlp_dim") or theirs["transformer_ffn/MLP.num_hidden_units"]
    d = get("DecoderStack.embedding_dim") or get("DecoderStack.embedding_size")
    layers = get("MelodiStack.num_layers") or get("TransformerStack.num_layers") or get("DecoderStack.num_layers")
    has_biases = "MLPWrapper" in str(get("TransformerBase.ffn_factory"))
    slope_and_bound = 1 + (get("BoundedALiBi.fixed_bound") is None)
    position = {
        "t5": 32 * h,
        "fourier": 128 * h,
        "nn": 128 + 128 + 128 * h,
        "orthogonal": get("OrthogonalBasisPositionBias.basis_size", 0) * h,
        "alibi": slope_and_bound,
    }.get(get(f"{layer}.relative_position_type"), 0)
    # Norm, keys, values, queries, scales, projection; norm and feed-forward.
    plain = d + 3 * d * h * k + h + h * k * d + d + 2 * d * f + (f + d) * has_biases
    reading_states = d * h * k + h + h * k * d
    recurrent = {i % layers for i in get("DecoderStack.recurrent_layer_indices", ())}
    memory = {i % layers for i in get("DecoderStack.memory_layer_indices", ())}
    feedback = get("DecoderStack.feedback_recurrence", True) and get("DecoderStack.dstack_window_length", 0) > 0
    total = get("TransformerTaskConfig.vocab_size") * d + d + layers * plain
    total += (layers - len(memory)) * position + len(memory) * h
    if recurrent:
        total += (layers if feedback else len(recurrent)) * reading_states
        total += len(recurrent) * cell_parameters(get, d, h * k, h, f)
    if get("TransformerStack.side_layer_indices") and get("TransformerStack.side_layer_factory") is not None:
        total += plain
    if not melodi:
        return total, 0
    u, r, e = (
        get(f"MelodiStack.{name}")
        for name in ("summary_size", "short_term_memory_size", "long_term_memory_increment_size")
    )
    summary_mix, short_mix, long_mix = (w + u + 1) * u + 2 * d, (w + u + 1) * r + 2 * d * (r == u), (w + u + 1) * e
    total += u * d + layers * (summary_mix + short_mix)
    total += len(get("MelodiStack.long_term_memory_layer_indices", ())) * (long_mix + h * k)
    return total, summary_mix


def cell_parameters(get: Any, d: int, inner: int, h: int, f: int) -> int:
    """The parameters of the cell of a recurrent layer."""
    states = get("TransformerLayer.recurrent_num_states")
    single, skip = (
        get("TransformerLayer.recurrent_single_gate", False),
        get("TransformerLayer.recurrent_skip_ffn", False),
    )
    has_gates = get("TransformerLayer.recurrent_gate_type", "bias") == "lstm"

    def gate(width: int) -> int:
        return 2 * (width * d + d) if has_gates else d

    # Initial states, their identities, norm, keys, values and two kinds of queries with scales.
    total = 2 * states * d + d + 4 * d * inner + 2 * h
    if not single:
        total += 2 * inner * d + gate(2 * inner)
    if not skip:
        total += (2 * inner if single else d) * f + f * d + gate(f) + (0 if single else d)
    return total


def convert(folder: Path, name: str, scratch: Path) -> dict[str, Any]:
    """The row of one of their files."""
    before = next(files for start, files in BEFORE.items() if name.startswith(start))
    row = {"file": name, "after": " ".join(before)}
    theirs = read_bindings(folder, [*before, name])
    recipe = recipe_of(theirs)
    if recipe.problems:
        return row | {"converts": False, "reason": "; ".join(recipe.problems)}
    (scratch / "ours.gin").write_text(recipe.text())
    try:
        model = Model(parse([str(scratch / "ours.gin")]).model, recipe.vocabulary_size)
    except UserError as error:
        return row | {"converts": False, "reason": str(error)}
    reference, idle = reference_parameters(theirs)
    counts = {"parameters": model.num_parameters, "reference_parameters": reference, "idle_parameters": idle}
    return row | {"converts": True, **counts}


def main(_: list[str]) -> None:
    folder = Path(CONFIGS.value)
    with tempfile.TemporaryDirectory() as scratch:
        names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.gin"))
        rows = pd.DataFrame([convert(folder, name, Path(scratch)) for name in names])
    counts = ["parameters", "reference_parameters", "idle_parameters"]
    rows = rows.astype(dict.fromkeys(counts, "Int64"))
    rows.to_csv(OUTPUT.value, index=False)
    equal = rows.parameters + rows.idle_parameters == rows.reference_parameters
    print(f"{rows.converts.sum()} of {len(rows)} convert, {equal.sum()} with the reference's number of parameters")
    sys.exit(int(equal.sum() != rows.converts.sum()))


if __name__ == "__main__":
    app.run(main)
