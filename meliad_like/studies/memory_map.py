"""How many pairs a model remembers over which distance: the accuracy of its answers on the grid of `memory_tasks`."""

import math
from typing import NamedTuple

import jax
import numpy as np
import pandas as pd

from meliad_like.config import with_changes
from meliad_like.data.memory_source import TASKS, Cell, MemoryTasksSource
from meliad_like.errors import UserError
from meliad_like.evaluation.perplexity import make_evaluator
from meliad_like.evaluation.report import with_progress
from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.model import Model
from meliad_like.studies.page import write_page
from meliad_like.studies.readings import Chosen, StudyRequest, Subject, choose, open_subject
from meliad_like.tables import Table

Z = 1.959964
"""The quantile of the normal distribution for intervals of 95 %."""


class Heat(NamedTuple):
    """A map of accuracies: a row for each number of items, a column for each distance."""

    title: str
    header: list[str]
    rows: list[tuple[int, list[tuple[int, str, str]]]]
    """(items, cells), where a cell is its colour from 0, chance, to 10, the accuracy, and its interval."""


def run(request: StudyRequest) -> None:
    """Writes the page. UserError if the model was not trained on `memory_tasks`, or the split is that of training."""
    subject = open_subject(request.checkpoint, request.gin_param, request.step)
    source = subject.run.source
    if not isinstance(source, MemoryTasksSource):
        raise UserError(f"memory_map: {request.checkpoint} was not trained with RunConfig.source = 'memory_tasks'")
    if request.split == "train":
        raise UserError("memory_map: --split=train has no whole grid: choose validation or test")
    chosen = choose([subject], request)
    maps = {subject.label: accuracies(subject, chosen)}
    if (cleared := _cleared(subject)) is not None:
        maps[cleared.label] = accuracies(cleared, chosen)
    frame = pd.concat(maps, names=["model"]).reset_index(level=0)
    totals = pd.concat([summary(cells, source.block_length).assign(model=label) for label, cells in maps.items()])
    totals = totals[["model", *totals.columns.drop("model")]]
    records = {"cells": frame.to_dict("records"), "summary": totals.replace({math.nan: None}).to_dict("records")}
    details = subject.details() | {
        "operations per token (forward)": round(subject.opened.model.forward_flops_per_token),
        "bytes of memory per document": _carry_bytes(subject.opened.model),
        "window (tokens)": subject.run.model.window_length,
        "block of filler": source.block_length,
    }
    table = Table.of(totals, formats=dict.fromkeys(("capacity (bits)", "beyond a block (bits)"), ".1f"))
    heats = [heat for label, cells in maps.items() for heat in _heats(label, cells)]
    frame.to_csv(request.output / "map.csv", index=False)
    totals.to_csv(request.output / "summary.csv", index=False)
    chosen.write_summary(request.output, {"model": details, **records})
    (request.output / "map.md").write_text(_markdown(heats, table), encoding="utf-8")
    title = f"{subject.label}: what is remembered, by number and distance"
    write_page(
        request.output / "index.html",
        "memory_map.html",
        title=title,
        heats=heats,
        totals=table,
        details=[details],
        models=[subject.label],
        chosen=chosen,
    )


def _cleared(subject: Subject) -> Subject | None:
    """The control: the states are cleared at every block, and so before the question. None: there are no states."""
    model = subject.run.model
    cleared = model.cleared() if isinstance(model, DecoderConfig) else None
    if cleared is None:
        return None
    window, lanes = model.window_length, subject.run.data.num_lanes
    run = with_changes(
        subject.run, {"model": cleared, "data.segment_length": window, "data.tokens_per_step": window * lanes}
    )
    opened = subject.opened._replace(run=run, model=Model(cleared, subject.opened.vocabulary.size))
    return subject._replace(opened=opened, label=f"{subject.label}, states cleared at every block")


def accuracies(subject: Subject, chosen: Chosen) -> pd.DataFrame:
    """A row for each cell of the grid: questions, right answers, accuracy, its 95 % interval, and chance."""
    evaluate = make_evaluator(
        subject.run,
        subject.opened.model,
        chosen.store,
        chosen.split_name,
        subject.mesh,
        documents=chosen.documents,
        whole_segments=True,
    )
    result = with_progress(subject.label, lambda report: evaluate(subject.opened.params, report))
    rows = [(*Cell.of_name(score.name), score.num_tokens, score.num_correct) for score in result.documents]
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
    """The least information in bits that answers of this accuracy have of the right one (Fano's inequality); 0 at
    chance and below."""
    if accuracy <= 1 / num_answers:
        return 0.0
    wrong = 1 - accuracy
    entropy = -sum(p * math.log2(p) for p in (accuracy, wrong) if p > 0)
    return math.log2(num_answers) - entropy - wrong * math.log2(max(num_answers - 1, 1))


def summary(cells: pd.DataFrame, block_length: int) -> pd.DataFrame:
    """A row for each task and number of items.

    Its columns: the most bits of all answers together that the accuracy implies at any distance, and at one of at least
    a block; and the first distance in tokens at which the accuracy above chance is less than half of that at the
    shortest one, NaN if there is none.
    """
    rows = []
    for (task, items), group in cells.groupby(["task", "items"], sort=False):
        kind, group = TASKS[task], group.sort_values("distance")
        answers = int(group["items"].iloc[0]) if kind.independent else 1
        above = ((group.accuracy - group.chance) / (1 - group.chance)).to_numpy()
        distances = group.distance.to_numpy() * block_length
        bits = [bits_of_answer(a, kind.num_answers) * answers for a in group.accuracy]
        # Where the shortest distance is at chance there is nothing to halve.
        halved = distances[above < above[0] / 2] if group.low.iloc[0] > group.chance.iloc[0] else []
        far = [b for b, distance in zip(bits, distances, strict=True) if distance]
        rows.append((task, items, max(bits), max(far, default=math.nan), halved[0] if len(halved) else math.nan))
    names = ["task", "items", "capacity (bits)", "beyond a block (bits)", "halved at (tokens)"]
    return pd.DataFrame(rows, columns=names)


def _carry_bytes(model: Model) -> int:
    carry = jax.eval_shape(lambda params: model.bind(params).init_carry(1), model.abstract_params)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(carry))


def _heats(label: str, cells: pd.DataFrame) -> list[Heat]:
    heats = []
    for task, group in cells.groupby("task", sort=False):
        distances, chance = sorted(group.distance.unique()), group.chance.iloc[0]
        rows = []
        for items, row in group.groupby("items"):
            at = row.set_index("distance")
            shown = []
            for distance in distances:
                if distance not in at.index:  # --document chose others
                    shown.append((0, "-", ""))
                    continue
                found = at.loc[distance]
                above = max(0.0, (found.accuracy - chance) / (1 - chance))
                interval = f"{found.low:.2f} to {found.high:.2f}"
                shown.append((round(10 * above), f"{found.accuracy:.2f}", interval))
            rows.append((int(items), shown))
        header = [f"{distance} blocks" for distance in distances]
        heats.append(Heat(f"{label}: {task}, chance {chance:.3f}", header, rows))
    return heats


def _markdown(heats: list[Heat], totals: Table) -> str:
    parts = []
    for heat in heats:
        rows = [(str(items), *(f"{value} ({interval})" for _, value, interval in row)) for items, row in heat.rows]
        parts.append(Table(heat.title, ("items", *heat.header), rows).to_markdown())
    return "\n".join([*parts, totals.to_markdown()])
