"""The number of pairs that a model remembers over each distance: its accuracy on the grid of `memory_tasks`."""

import math
from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd

from meliad_like.config import with_changes
from meliad_like.errors import UserError
from meliad_like.evaluation.report import with_progress
from meliad_like.models.model import Model
from meliad_like.studies.interventions import cleared, memory_of
from meliad_like.studies.memory_source import TASKS, Cell, MemoryTasksSource
from meliad_like.studies.page import Numbers, Study
from meliad_like.studies.readings import Selection, StudiedModel, StudyRequest, choose, make_reader, open_studied

SUMMARY_FORMATS = {"capacity (bits)": ".1f", "beyond a block (bits)": ".1f", "halved at (tokens)": ",.0f"}
"""Format specifications of the columns of `summary`."""
Z = 1.959964
"""The quantile of the normal distribution for intervals of 95 %."""


def run(request: StudyRequest) -> Study:
    """The maps of a model. UserError if it was not trained on `memory_tasks`, or the split is that of training."""
    studied = open_studied(request.checkpoint, request.gin_param, request.step)
    source = studied.run.source
    if not isinstance(source, MemoryTasksSource):
        raise UserError(f"memory_map: {request.checkpoint} was not trained with RunConfig.source = 'memory_tasks'")
    if request.split == "train":
        raise UserError("memory_map: --split=train has no whole grid: choose validation or test")
    selection = choose([studied], request)
    maps = {each.label: _accuracies(each, selection) for each in (studied, _cleared(studied)) if each}
    totals = by_model({label: summary(cells, source.block_length) for label, cells in maps.items()})
    details = studied.details() | {
        "operations per token (forward)": round(studied.opened.model.flops.forward),
        "bytes of memory per document": sum(x.size * x.dtype.itemsize for x in memory_of(studied.opened.model)),
        "window (tokens)": studied.run.model.window_length,
        "block of filler": source.block_length,
    }
    return Study(
        title=f"{studied.label}: what is remembered, by number and distance",
        lead=[
            "The share of right answers, by the number of items to remember and by the blocks of filler before the "
            "question. The intervals are of 95 % (Wilson), one question in each document."
        ],
        parts=[
            *(Numbers(f"map_{i}", title, grid) for i, (title, grid) in enumerate(grids(maps).items())),
            Numbers(
                "summary", "How much, and how far", totals, SUMMARY_FORMATS,
                "Capacity is the least information of all answers together that the lower end of the accuracy's "
                "interval implies (Fano's inequality), at the best distance. Halved at: the first distance at which "
                "the accuracy above chance is less than half of that at the shortest distance; - if there is none.",
            ),
            Numbers("map", "All cells", by_model(maps), shown=False),
        ],
        selection=selection,
        details=[details],
    )  # fmt: skip


def _cleared(studied: StudiedModel) -> StudiedModel | None:
    """The control model, whose states are cleared at every block, so before the question; None if it has no states."""
    clearing = cleared(studied.run.model)
    if clearing is None:
        return None
    window = clearing.window_length
    segments = {"data.segment_length": window, "data.tokens_per_step": window * studied.run.data.num_lanes}
    run = with_changes(studied.run, {"model": clearing, **segments})
    opened = studied.opened._replace(run=run, model=Model(clearing, studied.opened.vocabulary.size))
    return studied._replace(opened=opened, label=f"{studied.label}, states cleared at every block")


def _accuracies(studied: StudiedModel, selection: Selection) -> pd.DataFrame:
    evaluate = make_reader(studied, selection)
    result = with_progress(studied.label, lambda report: evaluate(studied.opened.params, report))
    return accuracies((score.name, score.num_tokens, score.num_correct) for score in result.documents)


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
    return pd.DataFrame(rows, columns=["task", "items", *SUMMARY_FORMATS])


def by_model(frames: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """The rows of several models under each other, with the models' names as the first column."""
    return pd.concat(frames, names=["model"]).reset_index(level=0)


def grids(maps: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """The map of each model and task by its title: accuracies with their intervals as text, a row for each number of
    items, a column for each distance."""
    titled = {}
    for label, cells in maps.items():
        for task, group in cells.groupby("task", sort=False):
            texts = [f"{c.accuracy:.2f} ({c.low:.2f} to {c.high:.2f})" for c in group.itertuples()]
            grid = group.assign(text=texts).pivot(index="items", columns="distance", values="text")
            # A choice of documents can leave cells without any.
            grid = grid.set_axis([*map(blocks, grid.columns)], axis=1).fillna("- ()").reset_index()
            titled[f"{label}: {task}, chance {group.chance.iloc[0]:.3f}"] = grid
    return titled


def blocks(distance: int) -> str:
    return "1 block" if distance == 1 else f"{distance} blocks"
