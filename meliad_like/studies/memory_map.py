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
from meliad_like.studies.readings import Selection, StudiedModel, StudyRequest, choose, make_reader, open_studied
from meliad_like.studies.states import memory_of


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
    cells = by_model(maps)
    totals = by_model({label: summary(of_model, source.block_length) for label, of_model in maps.items()})
    details = studied.details() | {
        "operations per token (forward)": round(studied.opened.model.flops.forward),
        "bytes of memory per document": sum(
            leaf.size * leaf.dtype.itemsize for leaf in memory_of(studied.opened.model)
        ),
        "window (tokens)": studied.run.model.window_length,
        "block of filler": source.block_length,
    }
    grids = [
        Numbers(f"map_{i}", grid.title, pd.DataFrame(grid.rows, columns=list(grid.header)))
        for i, grid in enumerate(tables(maps))
    ]
    return Study(
        title=f"{studied.label}: what is remembered, by number and distance",
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


def _cleared(studied: StudiedModel) -> StudiedModel | None:
    """The control model, whose states are cleared at every block, so before the question; None if it has no states."""
    model = studied.run.model
    clearing = cleared(model)
    if clearing is None:
        return None
    window, lanes = model.window_length, studied.run.data.num_lanes
    run = with_changes(
        studied.run, {"model": clearing, "data.segment_length": window, "data.tokens_per_step": window * lanes}
    )
    opened = studied.opened._replace(run=run, model=Model(clearing, studied.opened.vocabulary.size))
    return studied._replace(opened=opened, label=f"{studied.label}, states cleared at every block")


def _accuracies(studied: StudiedModel, selection: Selection) -> pd.DataFrame:
    evaluate = make_reader(studied, selection)
    result = with_progress(studied.label, lambda report: evaluate(studied.opened.params, report))
    return accuracies((score.name, score.num_tokens, score.num_correct) for score in result.documents)
