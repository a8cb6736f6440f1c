"""The number of pairs that a model remembers over each distance: its accuracy on the grid of `memory_tasks`."""

import pandas as pd

from meliad_like.config import with_changes
from meliad_like.errors import UserError
from meliad_like.evaluation.report import with_progress
from meliad_like.models.model import Model
from meliad_like.studies.interventions import cleared
from meliad_like.studies.map_tables import SUMMARY_FORMATS, accuracies, by_model, summary, tables
from meliad_like.studies.memory_source import MemoryTasksSource
from meliad_like.studies.page import Numbers, Study
from meliad_like.studies.readings import Selection, StudyRequest, Subject, choose, make_reader, open_subject


def run(request: StudyRequest) -> Study:
    """The maps of a model. UserError if it was not trained on `memory_tasks`, or the split is that of training."""
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
    grids = [
        Numbers(f"map_{i}", grid.title, pd.DataFrame(grid.rows, columns=list(grid.header)))
        for i, grid in enumerate(tables(maps))
    ]
    return Study(
        title=f"{subject.label}: what is remembered, by number and distance",
        lead=[
            "The share of right answers, by the number of items to remember and by the blocks of filler before the "
            "question. The intervals are of 95 % (Wilson), one question in each document."
        ],
        parts=[
            *grids,
            Numbers(
                "summary", "How much, and how far", totals, SUMMARY_FORMATS,
                "Capacity is the least information of all answers together that the lower end of the accuracy's "
                "interval implies (Fano's inequality), at the best distance. Halved at: the first distance at which "
                "the accuracy above chance is less than half of that at the shortest distance; - if there is none.",
            ),
            Numbers("map", "All cells", cells, shown=False),
        ],
        selection=selection,
        details=[details],
    )  # fmt: skip


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
