"""Pictures: curves of a run's metrics, and maps of shares."""

import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from etils import epath
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from meliad_like.errors import UserError
from meliad_like.remote import any_path, write_whole
from meliad_like.resumable import read_json
from meliad_like.training.metrics import FILE_NAME, read_rows

COLOURS = ("#1f5fa8", "#d1662b", "#3a8f5c", "#8a4fa3", "#b0892c", "#4aa3b5", "#c2477a")
SMOOTHED_PARTS = 25  # Number of parts of a curve; each is averaged to a point of the bold line.


def read_metrics(workdir: epath.PathLike, metric: str, by: str = "steps") -> dict[str, pd.Series]:
    """The values of each kind of measurement: `train`, and the splits that were evaluated during training.

    They are by step, or `by` the `tokens` that cost loss or the `seconds` of training until then: between two logs, as
    many for each step.
    """
    path = any_path(workdir) / FILE_NAME
    if not path.exists():
        raise UserError(f"there is no {path}: --workdir is the folder of a training")
    rows = pd.DataFrame(read_rows(path)).dropna(axis="columns", how="all")
    for name in (metric, {"steps": "step", "tokens": "num_tokens", "seconds": "seconds_per_step"}[by]):
        if name not in rows:
            names = sorted(set(rows) - {"step", "kind"})
            raise UserError(f"{path} has no {name}; it has {', '.join(names) or 'no figures yet'}")
    if by != "steps":
        logs = rows[rows["kind"].str.startswith("train")]
        seconds = logs["step"].diff().fillna(logs["step"]) * logs.get("seconds_per_step", 0)
        amounts = (logs["num_tokens"] if by == "tokens" else seconds).cumsum()
        rows["step"] = np.interp(rows["step"], [0, *logs["step"]], [0, *amounts])
    known = rows.dropna(subset=[metric]).groupby("kind", sort=False)
    return {str(kind): part.set_index("step")[metric] for kind, part in known}


def read_runs(workdirs: Sequence[str], metric: str, by: str = "steps") -> dict[str, pd.Series]:
    """The curves of `read_metrics` for one run or several; the names of several begin with their folders."""
    if len(workdirs) == 1:
        return read_metrics(workdirs[0], metric, by)
    return {f"{run}: {kind}": curve for run in workdirs for kind, curve in read_metrics(run, metric, by).items()}


def read_levels(path: epath.PathLike) -> dict[str, float]:
    """Reads the compressors' bits per byte on the split of an evaluation from its file."""
    if not epath.Path(path).exists():
        raise UserError(f"there is no evaluation {path}")
    saved = read_json(epath.Path(path))
    if "other_bits_per_byte" not in saved:
        raise UserError(f"{path} holds no compressors: write it with evaluate --compare --output")
    levels = saved["other_bits_per_byte"].items()
    return {f"{name} on {saved['split']}": value for name, value in levels if name != "untrained"}


def draw(
    curves: Mapping[str, pd.Series], levels: Mapping[str, float], label: str, output: Path, by: str = "steps"
) -> None:
    """Draws the curves, and the levels as horizontal lines, and writes the image file in the format of its suffix. A
    curve of many points also gets a bold line of averages. `label` is the label of the vertical axis."""
    # pyplot would need a display.
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    for colour, (kind, values) in zip(itertools.cycle(COLOURS), curves.items()):
        width = len(values) // SMOOTHED_PARTS
        if width > 1:
            axes.plot(values, color=colour, alpha=0.25, linewidth=1)
            axes.plot(values.rolling(width).mean(), color=colour, linewidth=2, label=f"{kind}, averaged")
        else:
            axes.plot(values, color=colour, linewidth=2, marker="o", markersize=4, label=kind)
    for name, value in levels.items():
        axes.axhline(value, color="#777777", linestyle="--", linewidth=1)
        axes.annotate(f" {name}", (1, value), xycoords=("axes fraction", "data"), va="center", annotation_clip=False)
    # The beginning of a curve is far above the rest, and would determine the scale.
    later = [values.iloc[len(values) // SMOOTHED_PARTS :] for values in curves.values()]
    shown = pd.concat([*later, pd.Series(levels, dtype=float)])
    margin = 0.05 * (shown.max() - shown.min()) or 1.0
    axes.set_ylim(shown.min() - margin, shown.max() + margin)
    axes.set(xlabel={"steps": "step"}.get(by, f"{by} of training"), ylabel=label)
    axes.grid(alpha=0.25)
    # Outside of the axes, where it covers no curve.
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    save(figure, output)


def save(figure: Figure, path: Path) -> None:
    """Writes a picture atomically, in the format of the path's suffix."""
    content = io.BytesIO()
    figure.savefig(content, format=path.suffix.lower().removeprefix("."))
    write_whole(path, content.getvalue())


def draw_map(axes: Axes, shares: pd.DataFrame, lowest: float = 0.0) -> None:
    """Draws a table of shares with its numbers, from white, `lowest`, to dark, 1; NaN is an empty cell."""
    axes.imshow(shares, vmin=lowest, vmax=1, cmap="Blues", aspect="auto")
    for (y, x), share in np.ndenumerate(shares.to_numpy()):
        number = "" if np.isnan(share) else f"{share:.2f}"
        axes.text(x, y, number, ha="center", va="center", color="white" if share > 0.6 else "black")
    axes.set_xticks(range(len(shares.columns)), map(str, shares.columns))
    axes.set_yticks(range(len(shares.index)), map(str, shares.index))
