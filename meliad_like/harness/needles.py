"""The scores of needle tasks (RULER; Hsieh et al. 2024) by a document's length and the depth of the needle in it."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from rich.console import Console

from meliad_like.errors import UserError
from meliad_like.studies.frames import table_of
from meliad_like.studies.pictures import draw_map, save

NEEDLE = r"special magic \S+ for [^\n]+? is: "
"""The beginning of the sentence that hides an answer, in RULER's needle tasks alone."""
NUM_DEPTHS = 10
"""The number of parts of a document whose needles are counted together."""


def by_depth(samples: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Mean scores: a row for each part of the documents, a column for each length in tokens.

    `samples` are those of a task, as the harness logs them. Those without a needle are left out: RULER's other tasks
    have the same fields. The depth is that of the first answer's first character, as a share of all characters.
    """
    rows = []
    for sample in samples:
        document = sample["doc"]
        if not {"input", "outputs", "max_length"} <= document.keys():
            continue
        text, answer, length = document["input"], document["outputs"][0], document["max_length"]
        if needle := re.search(NEEDLE + f"({re.escape(answer)})", text):
            depth = needle.start(1) / len(text)
            rows.append((int(depth * NUM_DEPTHS), length, sample[str(length)]))
    scores = pd.DataFrame(rows, columns=["depth", "length", "score"])
    cells = scores.pivot_table("score", "depth", "length")
    parts = [f"{100 * part // NUM_DEPTHS} to {100 * (part + 1) // NUM_DEPTHS} %" for part in cells.index]
    return cells.set_axis(pd.Index(parts, name="depth")).set_axis([f"{n:,} tokens" for n in cells.columns], axis=1)


def needle_maps(samples: Mapping[str, Iterable[Mapping[str, Any]]]) -> dict[str, pd.DataFrame]:
    """The scores of the needle tasks by name; other tasks are left out."""
    return {task: cells for task, of_task in samples.items() if len(cells := by_depth(of_task))}


def draw_heat_map(maps: Mapping[str, pd.DataFrame], path: Path) -> None:
    """Prints and draws the scores of each task. Raises a UserError if there are none."""
    if not maps:
        raise UserError("--heat_map: none of the tasks has needles and lengths; RULER's do, such as niah_single_1")
    picture = Figure(figsize=(6, 3.6 * len(maps)), dpi=120, layout="constrained")
    for axes, (task, cells) in zip(picture.subplots(len(maps), squeeze=False)[:, 0], maps.items()):
        Console().print(table_of(cells.reset_index(), task, dict.fromkeys(cells.columns, ".2f")).to_rich())
        draw_map(axes, cells)
        axes.set(ylabel="depth of the needle", title=task)
    save(picture, path)
