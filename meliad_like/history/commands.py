"""The commands of ancient history: scores, selections, evaluations and selectors."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import pandas as pd
from rich.console import Console

from meliad_like.config import RunConfig, read_changes
from meliad_like.data.readers import LanesReaderConfig, ReaderConfig, label
from meliad_like.data.split import Documents, random_subset
from meliad_like.data.token_store import TokenStore
from meliad_like.errors import UserError
from meliad_like.evaluation.report import with_progress
from meliad_like.families.pretrained.config import PretrainedConfig
from meliad_like.history import evaluation as report
from meliad_like.history.evaluation import VERSION
from meliad_like.history.gains import Candidates, SpanGains, TargetLosses
from meliad_like.history.selection import RANKINGS, Ranking, SpanScorer, choose
from meliad_like.history.selectors.inputs import make_inputs
from meliad_like.history.selectors.model import Selector, encoder_config, encoder_params
from meliad_like.history.selectors.scorer import open_selectors
from meliad_like.history.selectors.training import SelectorTraining
from meliad_like.history.settings import HistoryConfig, HistorySettings
from meliad_like.history.spans import Layout, Stride, candidates, whole_documents
from meliad_like.history.stride_store import WITHOUT_EFFECT, Journal, StoreInfo, StrideStore, fingerprint
from meliad_like.registry import fingerprint as fingerprint_of_values
from meliad_like.remote import write_whole
from meliad_like.resumable import check_same, write_json
from meliad_like.run.opening import OpenedCheckpoint, open_checkpoint, open_store, saved_config
from meliad_like.studies.frames import table_of
from meliad_like.tables import Table

CONTROLS = ("random", "overlap_oracle")
"""Selections that are always evaluated."""


class HistoryRequest(NamedTuple):
    """What the flags of the command line ask for."""

    checkpoint: str
    step: int | None = None
    changes: Callable[..., Any] = read_changes()
    """Changes of the checkpoint's config and of `HistorySettings`."""
    store: str | None = None
    split: str = "test"
    documents: tuple[str, ...] = ()
    """Names of the documents that are read; none: all."""
    document_tokens: int | None = None
    """Tokens that are read of each document, from its beginning; None: all."""
    max_tokens: int | None = None
    """Largest number of tokens of a random subset of the documents, the same each time; None: all."""
    batch_size: int = 16
    """Windows that are read at once."""

    def config(self, history: HistoryConfig | None = None) -> tuple[RunConfig, HistorySettings]:
        """The config of the checkpoint and the settings of the command, with the changes.

        `history`: the defaults of HistoryConfig; None: those that the checkpoint was trained with, if it was.
        """
        saved = saved_config(self.checkpoint, self.step)
        settings = HistorySettings(history or getattr(saved.data, "history", HistoryConfig()))
        # The checkpoint's reader is not used, and may have had other windows.
        common = {field.name: getattr(saved.data, field.name) for field in dataclasses.fields(ReaderConfig)}
        return self.changes(dataclasses.replace(saved, data=LanesReaderConfig(**common)), settings)

    def choose_documents(self, store: TokenStore) -> Documents:
        """The documents of a store that are read, or their beginnings."""
        documents = store.split(self.split)
        if self.documents:
            if unknown := set(self.documents) - set(documents.names):
                raise UserError(f"there is no document {min(unknown)!r} in the split {self.split} of {store.folder}")
            documents = documents.subset(np.flatnonzero(np.isin(documents.names, self.documents)))
        if self.max_tokens is not None:
            lengths = np.minimum(documents.lengths, self.document_tokens or documents.lengths)
            documents = documents.subset(random_subset(lengths, self.max_tokens))
        if self.document_tokens is None:
            return documents
        most = self.document_tokens * len(documents)
        return documents.beginnings(store.vocabulary, most, shortest=self.document_tokens)

    def open(self) -> "Opened":
        """Opens all that a command needs."""
        run, settings = self.config()
        checkpoint = open_checkpoint(self.checkpoint, step=self.step, changes=lambda _: run, mesh="config")
        store = open_store(checkpoint, self.checkpoint, self.store, prepare=False)
        layout = Layout.of(settings.history, checkpoint.vocabulary)
        return Opened(self, checkpoint, store, self.choose_documents(store), layout)


@dataclasses.dataclass(frozen=True)
class Opened:
    """A frozen model and documents, and how the model reads them."""

    request: HistoryRequest
    checkpoint: OpenedCheckpoint
    store: TokenStore
    documents: Documents
    layout: Layout

    @functools.cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the model with its parameters."""
        return fingerprint(self.checkpoint.model.for_separate_sequences(1), self.checkpoint.params)

    def losses(self, **lengths: int) -> TargetLosses:
        """The model as a reader of windows; `lengths`: `length` and `max_targets` of `TargetLosses`."""
        run, model, params, *_ = self.checkpoint
        limits = {"batch_size": self.request.batch_size, "loss_slice": run.training.loss_slice}
        return TargetLosses(model, params, self.checkpoint.mesh, **limits, **lengths)

    def gains(self) -> SpanGains:
        """The model, for scoring spans."""
        return SpanGains(self.losses, self.layout, self.fingerprint)

    def stride_store(self, folder: Path, what: str, maker: str, leaks: bool = False) -> StrideStore:
        """The folder for scores or selections of the documents; see `StoreInfo`."""
        fields = {"what": what, "config": self.layout.config, "maker": maker, "leaks_the_future": leaks}
        return StrideStore(folder, StoreInfo.of(self.documents, self.store, self.request.split, **fields))


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

    store = opened.stride_store(folder, "scores", opened.fingerprint)
    store.fill(make)
    Console().print(summary(store).to_rich())
    print(f"wrote {folder}")


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
    maker = f"{scorer.name} {scorer.fingerprint}"
    store = opened.stride_store(folder, "selections", maker, scorer.leaks_the_future)
    info, tokens = store.info, whole_documents(opened.documents)

    def make(strides: Iterable[Stride]) -> Iterator[np.ndarray]:
        for stride in strides:
            # Random choices depend on the place in the split, also where a subset of it is read.
            in_split = stride._replace(document=info.indices[stride.document])
            yield choose(scorer, info.documents[stride.document], tokens(stride.document), in_split, info.config)

    store.fill(make)
    print(f"wrote {folder}: the selections of {label(scorer.name, scorer.leaks_the_future)}")


def evaluate(
    request: HistoryRequest, folder: Path, names: Sequence[str], selectors: Sequence[str] = (), *, replace: bool = False
) -> None:
    """Evaluates the baseline, the controls and the given selections, and writes evaluation.json and evaluation.md.

    An interrupted evaluation resumes from the folder's journal of the finished documents; `replace`: as for `Journal`.
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
    journal, history = Journal(folder / "documents.jsonl", identity, replace=replace), opened.layout.config
    windows = opened.losses(length=history.window_length, max_targets=history.stride)
    work = functools.partial(report.evaluate, windows, documents, selections, opened.layout, journal)
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

    The documents and settings are those of the store in the folder `scores`. The checkpoint of the request is the
    decoder that the selector is initialised with, which need not be the model that scored.
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
