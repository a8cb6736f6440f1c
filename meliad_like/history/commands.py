"""The commands of ancient history: scores, selections, evaluations and selectors."""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
from rich.console import Console

from meliad_like.data.readers import label
from meliad_like.errors import UserError
from meliad_like.evaluation.report import with_progress
from meliad_like.families.pretrained.config import PretrainedConfig
from meliad_like.history import evaluation as report
from meliad_like.history.evaluation import VERSION
from meliad_like.history.gains import Candidates
from meliad_like.history.journal import Journal
from meliad_like.history.opening import HistoryRequest, Opened
from meliad_like.history.selection import RANKINGS, Ranking, SpanScorer, choose
from meliad_like.history.selectors.inputs import make_inputs
from meliad_like.history.selectors.model import Selector, encoder_config, encoder_params
from meliad_like.history.selectors.scorer import open_selectors
from meliad_like.history.selectors.training import SelectorTraining
from meliad_like.history.spans import Stride, candidates, whole_documents
from meliad_like.history.stride_store import WITHOUT_EFFECT, StoreInfo, StrideStore, fingerprint
from meliad_like.registry import fingerprint as fingerprint_of_values
from meliad_like.remote import write_whole
from meliad_like.resumable import check_same, write_json
from meliad_like.run.opening import open_checkpoint, open_store
from meliad_like.studies.frames import table_of
from meliad_like.tables import Table

CONTROLS = ("random", "overlap_oracle")
"""Selections that are always evaluated."""


def scorers(opened: Opened, names: Collection[str], selectors: Sequence[str] = ()) -> list[SpanScorer]:
    """Rankings by their names, the oracles last, and then trained selectors by their folders."""
    config = opened.layout.config
    rankings = [Ranking(name, config) for name in RANKINGS if name in names]
    oracle = [opened.gains()] if "score_oracle" in names else []
    return [*rankings, *oracle, *open_selectors(selectors, config, opened.store)]


def score(request: HistoryRequest, folder: Path) -> None:
    """Makes a store of scores, or resumes it, and prints a summary."""
    opened = request.open()
    config, tokens = opened.layout.config, whole_documents(opened.documents)

    def make(strides: Iterable[Stride]) -> Iterator[np.ndarray]:
        return opened.gains()(Candidates(tokens(s.document), s, candidates(s, config)) for s in strides)

    store = _store(opened, folder, "scores", opened.fingerprint)
    store.fill(make)
    Console().print(summary(store).to_rich())
    print(f"wrote {folder}")


def _store(opened: Opened, folder: Path, what: str, maker: str, leaks: bool = False) -> StrideStore:
    fields = {"what": what, "config": opened.layout.config, "maker": maker, "leaks_the_future": leaks}
    return StrideStore(folder, StoreInfo.of(opened.documents, opened.store, opened.request.split, **fields))


def summary(store: StrideStore) -> Table:
    """Statistics of the scores, and of the best score of each stride."""
    rows = store.rows().astype({"score": np.float64})
    columns: dict[str, Any] = {"scores": rows["score"], "best": rows.groupby(["document", "stride"])["score"].max()}
    figures = pd.DataFrame({name: column.describe() for name, column in columns.items()})
    figures.loc["share above 0"] = [(column > 0).mean() for column in columns.values()]
    title = f"gains in nats against the {store.info.config.baseline} baseline: of all spans, and of each stride's best"
    return table_of(figures.rename_axis("").reset_index(), title, dict.fromkeys(columns, ",.4g"))


def select(request: HistoryRequest, folder: Path, names: Sequence[str], selectors: Sequence[str] = ()) -> None:
    """Makes a store of the spans that one selection chooses, for training with it."""
    opened = request.open()
    (scorer,) = scorers(opened, names, selectors)
    store = _store(opened, folder, "selections", f"{scorer.name} {scorer.fingerprint}", scorer.leaks_the_future)
    info, tokens = store.info, whole_documents(opened.documents)

    def make(strides: Iterable[Stride]) -> Iterator[np.ndarray]:
        for stride in strides:
            # Random choices depend on the place in the split, also where a subset of it is read.
            in_split = stride._replace(document=info.indices[stride.document])
            yield choose(scorer, info.documents[stride.document], tokens(stride.document), in_split, info.config)[0]

    store.fill(make)
    print(f"wrote {folder}: the selections of {label(scorer.name, scorer.leaks_the_future)}")


def evaluate(
    request: HistoryRequest, folder: Path, names: Sequence[str], selectors: Sequence[str] = (), *, replace: bool = False
) -> None:
    """Evaluates the baseline, the controls and the given selections, and writes evaluation.json and evaluation.md.

    The folder also gets the journal of the finished documents, from which an interrupted evaluation resumes; `replace`:
    as for `Journal`.
    """
    opened = request.open()
    documents, selections = opened.documents, scorers(opened, {*CONTROLS, *names}, selectors)
    identity = {
        "version": VERSION,
        "model": opened.fingerprint,
        "store": opened.store.fingerprint,
        "config": dataclasses.asdict(opened.layout.config),
        "documents": list(zip(documents.names, documents.lengths.tolist())),
        "selections": [(selection.name, selection.fingerprint) for selection in selections],
    }
    journal = Journal(folder / "documents.jsonl", identity, replace=replace)
    history = opened.layout.config
    windows = opened.losses(length=history.window_length, max_targets=history.stride)
    work = partial(report.evaluate, windows, documents, selections, opened.layout, journal)
    evaluation = with_progress(f"{request.split} in {folder.name}", work)
    content = {
        "checkpoint": request.checkpoint,
        "step": opened.checkpoint.step,
        "split": request.split,
        "store_fingerprint": opened.store.fingerprint,
        "document_tokens": request.document_tokens,
        "device": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        **report.to_dict(evaluation),
    }
    tables = report.tables(content)
    for table in tables:
        Console().print(table.to_rich())
    write_json(folder / "evaluation.json", content)
    write_whole(folder / "evaluation.md", "\n".join(table.to_markdown() for table in tables))
    print(f"wrote {folder / 'evaluation.md'} and .json")


def train_selector(request: HistoryRequest, folder: Path, scores: str) -> int:
    """Trains a selector, or resumes its training; returns the exit status of `SelectorTraining.run`.

    Args:
        request: its checkpoint is that of the decoder that the selector is initialised with, which need not be the
            model that scored.
        scores: folder of a store of scores, whose documents and settings hold.
    """
    scored = StrideStore(scores)
    if scored.info.what != "scores":
        raise UserError(f"{scores} is a store of {scored.info.what}, and a selector is trained on scores")
    history, pairs = scored.info.config, scored.rows()
    run, settings = request.config(history)
    theirs, ours = dataclasses.asdict(history), dataclasses.asdict(settings.history)
    check_same(scored.folder, theirs, ours, WITHOUT_EFFECT, "leave it out, or make new scores")
    opened = open_checkpoint(request.checkpoint, step=request.step, changes=lambda _: run, mesh="config")
    if not isinstance(opened.run.model, PretrainedConfig):
        raise UserError(f"a selector begins with a pretrained decoder, and {request.checkpoint} is of another family")
    store = open_store(opened, request.checkpoint, request.store, prepare=False)
    inputs = make_inputs(history, settings.selector, opened.vocabulary)
    encoder = encoder_config(settings.selector, opened.run.model, inputs.text_length)
    return SelectorTraining(
        Selector(settings.selector, encoder, opened.vocabulary.size),
        encoder_params(encoder, opened.params),
        inputs,
        settings.selector_training,
        pairs,
        scored.documents(store),
        opened.vocabulary,
        folder,
        {
            "scored_by": scored.info.maker,
            "initialised_with": fingerprint(opened.model.for_separate_sequences(1), opened.params),
            "store_fingerprint": store.fingerprint,
            "split": scored.info.split,
            "documents": fingerprint_of_values([scored.info.documents, scored.info.lengths, scored.info.indices]),
            "num_documents": len(scored.info.documents),
            "num_pairs": len(pairs),
        },
        opened.mesh,
    ).run()
