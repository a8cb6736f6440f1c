"""The memory map: how many answers of the documents of `memory_tasks` are right, by number of items and distance."""

import math
from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd

from meliad_like.studies.frames import table_of
from meliad_like.studies.memory_source import TASKS, Cell
from meliad_like.tables import Table

SUMMARY_FORMATS = {"capacity (bits)": ".1f", "beyond a block (bits)": ".1f", "halved at (tokens)": ",.0f"}
"""Format specifications of the columns of `summary`."""
Z = 1.959964
"""The quantile of the normal distribution for intervals of 95 %."""


def accuracies(answers: Iterable[tuple[str, int, int]]) -> pd.DataFrame:
    """A row for each cell of the grid: questions, right answers, accuracy, its 95 % interval, and chance. `answers`: of
    each document its name, the number of questions and of right answers; of several models all together."""
    rows = [(*Cell.of_name(name), questions, correct) for name, questions, correct in answers]
    frame = pd.DataFrame(rows, columns=[*Cell._fields, "questions", "correct"])
    cells = frame.groupby(list(Cell._fields), as_index=False, sort=False).sum()
    cells["accuracy"] = cells.correct / cells.questions
    cells["low"], cells["high"] = wilson(cells.correct.to_numpy(), cells.questions.to_numpy())
    cells["chance"] = [1 / TASKS[task].num_answers for task in cells.task]
    return cells


def wilson(correct: np.ndarray, number: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 95 % interval of a binomial proportion (Wilson 1927)."""
    centre = (correct + Z**2 / 2) / (number + Z**2)
    half = Z / (number + Z**2) * np.sqrt(correct * (number - correct) / number + Z**2 / 4)
    return centre - half, centre + half


def bits_of_answer(accuracy: float, num_answers: int) -> float:
    """A lower bound, in bits, of the information that answers of this accuracy carry about the right answer (Fano's
    inequality); 0 at chance and below."""
    if accuracy <= 1 / num_answers:
        return 0.0
    wrong = 1 - accuracy
    entropy = -sum(p * math.log2(p) for p in (accuracy, wrong) if p > 0)
    return math.log2(num_answers) - entropy - wrong * math.log2(max(num_answers - 1, 1))


def summary(cells: pd.DataFrame, block_length: int) -> pd.DataFrame:
    """A row for each task and number of items.

    Its columns: the bits of all answers together that the accuracy implies at the best distance, and at the best one of
    at least a block; and the first distance in tokens at which the accuracy above chance is less than half of that at
    the shortest one, NaN if there is none. The bits are those of the lower end of the accuracy's interval, because the
    best of several estimates is too high on average.
    """
    rows = []
    for (task, items), group in cells.groupby(["task", "items"], sort=False):
        kind, group = TASKS[task], group.sort_values("distance")
        answers = int(group["items"].iloc[0]) if kind.independent else 1
        above = ((group.accuracy - group.chance) / (1 - group.chance)).to_numpy()
        distances = group.distance.to_numpy() * block_length
        bits = [bits_of_answer(low, kind.num_answers) * answers for low in group.low]
        # Where the shortest distance is at chance there is nothing to halve.
        halved = distances[above < above[0] / 2] if group.low.iloc[0] > group.chance.iloc[0] else []
        far = [b for b, distance in zip(bits, distances, strict=True) if distance]
        rows.append((task, items, max(bits), max(far, default=math.nan), halved[0] if len(halved) else math.nan))
    names = ["task", "items", "capacity (bits)", "beyond a block (bits)", "halved at (tokens)"]
    return pd.DataFrame(rows, columns=names)


def by_model(frames: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """The rows of several models under each other, with the models' names as the first column."""
    return pd.concat(frames, names=["model"]).reset_index(level=0)


def by_distance(maps: Mapping[str, pd.DataFrame]) -> Table:
    """Models side by side: the share of right answers at each distance, of all tasks and numbers of items together."""
    sums = {label: cells.groupby("distance")[["correct", "questions"]].sum() for label, cells in maps.items()}
    shares = pd.DataFrame({label: each.correct / each.questions for label, each in sums.items()}).sort_index().T
    shares.columns = _blocks(shares.columns)
    formats = dict.fromkeys(shares.columns, ".2f")
    return table_of(shares.reset_index(names="model"), "Right answers by distance", formats)


def summary_table(totals: pd.DataFrame) -> Table:
    """Summaries of several models as a table."""
    return table_of(totals, formats=SUMMARY_FORMATS)


def tables(maps: Mapping[str, pd.DataFrame]) -> list[Table]:
    """The map of each model and task."""
    return [
        accuracy_table(f"{label}: {task}, chance {group.chance.iloc[0]:.3f}", group)
        for label, cells in maps.items()
        for task, group in cells.groupby("task", sort=False)
    ]


def accuracy_table(title: str, cells: pd.DataFrame) -> Table:
    """Accuracies of a task with their intervals: a row for each number of items, a column for each distance."""
    texts = [f"{c.accuracy:.2f} ({c.low:.2f} to {c.high:.2f})" for c in cells.itertuples()]
    grid = cells.assign(text=texts).pivot(index="items", columns="distance", values="text")
    # A choice of documents can leave cells without any.
    rows = grid.set_axis(_blocks(grid.columns), axis=1).fillna("- ()").reset_index().astype(str)
    return table_of(rows, title)


def _blocks(distances: Iterable[int]) -> list[str]:
    return ["1 block" if distance == 1 else f"{distance} blocks" for distance in distances]
