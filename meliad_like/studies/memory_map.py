"""How many pairs a model remembers over which distance: the accuracy of its answers on the grid of `memory_tasks`."""

import math

import pandas as pd

from meliad_like.config import with_changes
from meliad_like.errors import UserError
from meliad_like.evaluation.report import with_progress
from meliad_like.models.model import Model
from meliad_like.studies.interventions import cleared
from meliad_like.studies.map_tables import accuracies, by_model, summary, summary_table, tables
from meliad_like.studies.memory_source import MemoryTasksSource
from meliad_like.studies.page import write_page
from meliad_like.studies.readings import Selection, StudyRequest, Subject, choose, make_reader, open_subject


def run(request: StudyRequest) -> None:
    """Writes the page. UserError if the model was not trained on `memory_tasks`, or the split is that of training."""
    subject = open_subject(request.checkpoint, request.gin_param, request.step)
    source = subject.run.source
    if not isinstance(source, MemoryTasksSource):
        raise UserError(f"memory_map: {request.checkpoint} was not trained with RunConfig.source = 'memory_tasks'")
    if request.split == "train":
        raise UserError("memory_map: --split=train has no whole grid: choose validation or test")
    selection = choose([subject], request)
    maps = {each.label: _accuracies(each, selection) for each in (subject, _cleared(subject)) if each}
    cells = by_model(maps)
    totals = by_model({label: summary(of_model, source.block_length) for label, of_model in maps.items()})
    details = subject.details() | {
        "operations per token (forward)": round(subject.opened.model.forward_flops_per_token),
        "bytes of memory per document": sum(leaf.size * leaf.dtype.itemsize for leaf in subject.opened.model.memory),
        "window (tokens)": subject.run.model.window_length,
        "block of filler": source.block_length,
    }
    cells.to_csv(request.output / "map.csv", index=False)
    totals.to_csv(request.output / "summary.csv", index=False)
    write_page(
        request.output,
        "memory_map",
        {"cells": cells.to_dict("records"), "summary": totals.replace({math.nan: None}).to_dict("records")},
        title=f"{subject.label}: what is remembered, by number and distance",
        selection=selection,
        details=[details],
        tables=tables(maps),
        totals=summary_table(totals),
    )


def _cleared(subject: Subject) -> Subject | None:
    """The control model, whose states are cleared at every block, so before the question; None if it has no states."""
    model = subject.run.model
    clearing = cleared(model)
    if clearing is None:
        return None
    window, lanes = model.window_length, subject.run.data.num_lanes
    run = with_changes(
        subject.run, {"model": clearing, "data.segment_length": window, "data.tokens_per_step": window * lanes}
    )
    opened = subject.opened._replace(run=run, model=Model(clearing, subject.opened.vocabulary.size))
    return subject._replace(opened=opened, label=f"{subject.label}, states cleared at every block")


def _accuracies(subject: Subject, selection: Selection) -> pd.DataFrame:
    evaluate = make_reader(subject, selection)
    result = with_progress(subject.label, lambda report: evaluate(subject.opened.params, report))
    return accuracies((score.name, score.num_tokens, score.num_correct) for score in result.documents)
