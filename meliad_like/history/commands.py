"""The commands of ancient history: scores, selections, evaluations and a search for the lengths."""

import dataclasses
import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console

from meliad_like.data.readers import label
from meliad_like.errors import UserError
from meliad_like.evaluation.report import with_progress
from meliad_like.history import report
from meliad_like.history.evaluation import BASELINE, VERSION, Evaluation, evaluate
from meliad_like.history.journal import Journal
from meliad_like.history.losses import TargetLosses
from meliad_like.history.opening import Opened, Request, open_request
from meliad_like.history.scoring import Request as GainRequest
from meliad_like.history.selection import OverlapOracle, PrefixOverlap, RandomSpans, RecentSpans, ScoreOracle
from meliad_like.history.selectors.scorer import open_selectors
from meliad_like.history.spans import (
    HistoryConfig,
    SpanScorer,
    Stride,
    candidates,
    index_in_split,
    rank,
    select,
)
from meliad_like.history.stride_store import StoreInfo, StrideStore, fingerprint, whole_documents
from meliad_like.tables import Table

CONTROLS = ("random", "overlap_oracle")
"""Always evaluated."""


def selections(opened: Opened, names: Collection[str], selectors: Sequence[str] = ()) -> list[SpanScorer]:
    """What is asked for by name, the oracles last, and then trained selectors by their folders."""
    config = opened.config
    make = {
        "random": lambda: RandomSpans(config),
        "recent": RecentSpans,
        "prefix_overlap": lambda: PrefixOverlap(config),
        "overlap_oracle": lambda: OverlapOracle(config),
        "score_oracle": lambda: ScoreOracle(opened.gains()),
    }
    assert set(names) <= set(make)
    chosen: list[SpanScorer] = [make[name]() for name in make if name in names]
    return [*chosen, *open_selectors(selectors, config, opened.store)]


def score(request: Request, folder: Path) -> None:
    """Makes a store of scores, or goes on with it, and says what is in it."""
    opened = open_request(request)
    info = _info(opened, request, what="scores", maker=fingerprint(opened.checkpoint.model, opened.checkpoint.params))
    store = StrideStore(folder, info)
    if len(store.missing()):
        gains, tokens = opened.gains(), whole_documents(opened.documents)

        def make(strides: Iterable[Stride]) -> Iterator[np.ndarray]:
            return gains(GainRequest(tokens(s.document), s, candidates(s, info.config)) for s in strides)

        with_progress("scores", lambda progress: store.fill(make, progress))
    Console().print(summary(store).to_rich())
    print(f"wrote {folder}")


def summary(store: StrideStore) -> Table:
    """What kind of numbers the scores are."""
    scores = store.numbers.astype(np.float64)
    best = np.maximum.reduceat(scores, store.offsets[:-1])
    rows = {
        "documents": f"{len(store.info.documents):,}",
        "strides": f"{len(store.strides):,}",
        "scores": f"{len(scores):,}",
        "mean": f"{scores.mean():.3f}",
        "standard deviation": f"{scores.std():.3f}",
        "least": f"{scores.min():.2f}",
        "most": f"{scores.max():.2f}",
        "above 0": f"{(scores > 0).mean():.1%}",
        "strides with one above 0": f"{(best > 0).mean():.1%}",
        "mean of the strides' best": f"{best.mean():.2f}",
    }
    return Table(f"gains in nats, against the {store.info.config.baseline} baseline", ("", ""), list(rows.items()))


def select_spans(request: Request, folder: Path, names: Sequence[str], selectors: Sequence[str] = ()) -> None:
    """Makes a store of what one selection chooses, for training with it (`ReaderConfig.selections`).

    Args:
        request: what it reads.
        folder: of the store.
        names, selectors: as of `evaluate_selections`, of which there must be one.
    """
    opened = open_request(request)
    (scorer,) = selections(opened, names, selectors)
    # Other rankings are functions of the config alone.
    made_of = [_stamps(selectors)] if selectors else []
    if isinstance(scorer, ScoreOracle):
        made_of = [fingerprint(opened.checkpoint.model, opened.checkpoint.params)]
    maker = " ".join([scorer.name, *(hashlib.sha256(json.dumps(part).encode()).hexdigest()[:12] for part in made_of)])
    info = _info(opened, request, what="selections", maker=maker, leaks_the_future=scorer.leaks_the_future)
    store, tokens = StrideStore(folder, info), whole_documents(opened.documents)

    def make(strides: Iterable[Stride]) -> Iterator[np.ndarray]:
        for stride in strides:
            name, document = info.documents[stride.document], tokens(stride.document)
            # Chance goes by the place in the split, as where spans are selected at once.
            placed = stride._replace(document=info.indices[stride.document])
            ends, scores = rank(scorer, name, document, placed, info.config)
            yield select(scores, ends, info.config)

    with_progress("selections", lambda progress: store.fill(make, progress))
    print(f"wrote {folder}: what {label(scorer.name, scorer.leaks_the_future)} selects")


def evaluate_selections(
    request: Request, folder: Path, names: Sequence[str], selectors: Sequence[str] = (), *, replace: bool = False
) -> None:
    """Evaluates the baseline, the controls and what is asked for, and writes what is found.

    Args:
        request: what is evaluated.
        folder: of evaluation.json, evaluation.md and what is done so far (`Journal`).
        names: as of `selections`.
        selectors: folders of trained ones.
        replace: as of `Journal`.
    """
    opened = open_request(request)
    chosen = selections(opened, {*CONTROLS, *names}, selectors)
    evaluation = _evaluate(
        opened, opened.windows(), chosen, opened.config, folder, request.split, _stamps(selectors), replace=replace
    )
    extra = {
        "checkpoint": request.checkpoint,
        "step": opened.checkpoint.step,
        "split": request.split,
        "store_fingerprint": opened.store.fingerprint,
        "document_tokens": request.document_tokens,
    }
    evaluation = dataclasses.replace(evaluation, extra=extra)
    console = Console()
    for table in report.tables(evaluation):
        console.print(table.to_rich())
    report.write(evaluation, folder)
    print(f"wrote {folder / 'evaluation.md'} and evaluation.json")


def search(request: Request, folder: Path, history_lengths: Sequence[int], span_lengths: Sequence[int]) -> None:
    """Evaluates the score oracle, and the controls beside it, at lengths j and l (section 3 of Ancient History Language
    Models).

    Args:
        request: what is evaluated; the paper searches on training documents.
        folder: of search.json, search.md, and what is done so far of each pair.
        history_lengths, span_lengths: all pairs of these that fit together.

    Raises:
        UserError: none fits.
    """
    opened = open_request(request)
    windows, found = opened.windows(), []
    pairs = [(j, span) for j in history_lengths for span in span_lengths]
    for j, span in pairs:
        try:
            config = dataclasses.replace(opened.config, history_length=j, span_length=span)
        except UserError as error:
            found.append({"history_length": j, "span_length": span, "why_not": str(error)})
            continue
        chosen = [RandomSpans(config), OverlapOracle(config), ScoreOracle(opened.gains(config))]
        evaluation = _evaluate(opened, windows, chosen, config, folder / f"j{j}_l{span}", f"j={j}, l={span}")
        bootstrap = report.Bootstrap(len(evaluation.names))
        figures = {
            sums.name: dataclasses.asdict(report.figures(evaluation, sums, bootstrap)["perplexity"])
            | {"leaks_the_future": sums.leaks_the_future}
            for sums in evaluation.selections
        }
        found.append({"history_length": j, "span_length": span, **figures})
        told = (f"{label(name, row['leaks_the_future'])} {row['value']:.4f}" for name, row in figures.items())
        print(f"j={j}, l={span}: {', '.join(told)}")
    tables = search_tables(found, history_lengths, span_lengths, opened.config)
    for table in tables:
        Console().print(table.to_rich())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "search.json").write_text(json.dumps(found, indent=2) + "\n")
    (folder / "search.md").write_text("\n".join(table.to_markdown() for table in tables))
    print(f"wrote {folder / 'search.md'} and search.json")


def search_tables(
    found: Sequence[dict], history_lengths: Sequence[int], span_lengths: Sequence[int], config: HistoryConfig
) -> list[Table]:
    """The perplexity by j and l: of the score oracle, the best one marked, and of the controls.

    Raises:
        UserError: no pair of lengths fits.
    """
    fitting = {(row["history_length"], row["span_length"]): row for row in found if "why_not" not in row}
    if not fitting:
        raise UserError(f"none of these lengths fits: {found[0]['why_not']}")
    first = next(iter(fitting.values()))
    best = min(fitting, key=lambda pair: fitting[pair][report.ORACLE]["value"])

    def table(name: str) -> Table:
        def cell(j: int, span: int) -> str:
            if (j, span) not in fitting:
                return "-"
            marked = name == report.ORACLE and (j, span) == best
            return f"{fitting[j, span][name]['value']:.4f}" + (" *" if marked else "")

        rows = [(f"j = {j}", *(cell(j, span) for span in span_lengths)) for j in history_lengths]
        title = (
            f"perplexity per token, {label(name, first[name]['leaks_the_future'])}; baseline "
            f"{first[BASELINE]['value']:.4f}, window {config.window_length}, stride {config.stride}; "
            f"{'*: the best, ' if name == report.ORACLE else ''}-: does not fit{report.among(config.max_candidates)}"
        )
        return Table(title, ("", *(f"l = {span}" for span in span_lengths)), rows)

    return [table(name) for name in (report.ORACLE, *CONTROLS)]


def _evaluate(
    opened: Opened,
    windows: TargetLosses,
    chosen: Sequence[SpanScorer],
    config: HistoryConfig,
    folder: Path,
    title: str,
    stamps: dict[str, list[str]] | None = None,
    *,
    replace: bool = False,
) -> Evaluation:
    """Evaluates, or goes on with it: what is done is kept in the folder."""
    made_of = {
        "version": VERSION,
        "model": fingerprint(opened.checkpoint.model, opened.checkpoint.params),
        "store": opened.store.fingerprint,
        "config": dataclasses.asdict(config),
        "documents": [list(pair) for pair in zip(opened.documents.names, opened.documents.lengths.tolist())],
        "selections": [selection.name for selection in chosen],
        "selectors": stamps or {},
    }
    journal = Journal(folder, made_of, replace=replace)

    def work(progress):
        return evaluate(
            windows,
            opened.documents,
            chosen,
            config,
            opened.separator,
            progress,
            done=journal.done,
            on_document=journal.write,
        )

    return with_progress(title, work)


def _stamps(folders: Sequence[str]) -> dict[str, list[str]]:
    """Of each folder something that changes where its files do."""

    def stamp(folder: str) -> list[str]:
        files = sorted(path for path in Path(folder).expanduser().rglob("*") if path.is_file())
        return [f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files]

    return {folder: stamp(folder) for folder in folders}


def _info(opened: Opened, request: Request, **what) -> StoreInfo:
    return StoreInfo(
        config=opened.config,
        store=opened.store.fingerprint,
        split=request.split,
        documents=tuple(opened.documents.names),
        lengths=tuple(int(length) for length in opened.documents.lengths),
        indices=tuple(index_in_split(opened.documents, i) for i in range(len(opened.documents.lengths))),
        **what,
    )
