"""Documents predicted with and without selected spans, in the same pass; figures with intervals, tables and JSON.

As in Ancient History Language Models, section 3. The plain window and every selection predict the same targets.
"""

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from meliad_like.data.readers import label
from meliad_like.data.split import Documents
from meliad_like.history.gains import TargetLosses
from meliad_like.history.selection import SpanScorer, choose
from meliad_like.history.settings import HistoryConfig
from meliad_like.history.spans import Ends, Layout, Stride, Window, strides
from meliad_like.history.stride_store import Journal
from meliad_like.studies.frames import number
from meliad_like.studies.loss_sums import intervals
from meliad_like.tables import Table

BASELINE = "baseline"
"""Name of the window without spans."""
VERSION = 6
"""Version of the numbers: evaluations of different versions are not comparable, and none resumes another."""
COSTS = ("model_flops", "selection_flops")
"""Operations of the model that predicts, and of the selection."""
SUMS = ("num_tokens", "num_tokens_where_selected", "nats", "nats_where_selected", *COSTS)
"""The sums over the strides of a document, for each selection: of tokens that count, and where spans are selected."""


class StrideReading(NamedTuple):
    """The predictions for one stride. The dictionaries have the names of the selections, if the stride selects."""

    stride: Stride
    nats: dict[str, Float[np.ndarray, " targets"]]
    """Losses of the targets with each selection, and those of the plain window as BASELINE. A document's first token
    has none."""
    spans: dict[str, Ends]
    """The selected spans, in the order of the window."""
    flops: dict[str, float]
    """Operations of the selection."""


def read_strides(
    windows: TargetLosses, documents: Documents, selections: Sequence[SpanScorer], layout: Layout, index: int
) -> Iterator[StrideReading]:
    """Predicts every token of a document once with the plain window and with each selection, stride by stride.

    `windows` is the model, for windows of `layout.config.window_length` with `layout.config.stride` targets; `index` is
    that of the document in `documents`. The selections have different names. Raises a UserError as `choose` does.
    """
    waiting: deque[StrideReading] = deque()

    def to_read() -> Iterator[Window]:
        length = int(documents.lengths[index])
        tokens = documents.tokens(index, 0, length)
        for stride in strides(length, layout.config, int(documents.indices[index])):
            reading = StrideReading(stride, {}, {}, {})
            waiting.append(reading)
            for selection in selections if stride.selects else ():
                name, flops_before = selection.name, selection.flops
                reading.spans[name] = choose(selection, documents.names[index], tokens, stride, layout.config)
                reading.flops[name] = selection.flops - flops_before
            for ends in (np.zeros(0, np.int64), *reading.spans.values()):
                yield layout.window(tokens, stride, ends)

    losses = windows(to_read())
    for plain in losses:
        reading = waiting.popleft()
        # A window without spans is the same for all selections.
        reading.nats.update(dict.fromkeys((BASELINE, *(selection.name for selection in selections)), plain))
        reading.nats.update((name, next(losses)) for name in reading.spans)
        yield reading


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The results of selections on the same documents."""

    config: HistoryConfig
    documents: pd.DataFrame
    """`name`, `num_words` and `num_bytes` of each document."""
    sums: pd.DataFrame
    """`SUMS` by selection and document."""
    selections: dict[str, bool]
    """Names of the selections, the baseline first, and whether they leak the future."""

    def of(self, name: str) -> Any:
        """The sums of a selection: a frame with a line for each document."""
        return self.sums.loc[name]


def evaluate(
    windows: TargetLosses,
    documents: Documents,
    selections: Sequence[SpanScorer],
    layout: Layout,
    journal: Journal | None = None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Sums the losses of `read_strides`, document by document, of those that the journal does not have yet.

    `on_progress` is called with the numbers of tokens read so far and in all. Raises a UserError as `choose` does.
    """
    names, ends = [BASELINE, *(selection.name for selection in selections)], np.cumsum(documents.lengths)
    by_document = list(journal.rows) if journal else []
    for index in range(len(by_document), len(ends)):
        sums = np.zeros((len(names), len(SUMS)))
        for reading in read_strides(windows, documents, selections, layout, index):
            sums += [_of_stride(reading, name, layout.config, windows.flops_per_window) for name in names]
            on_progress(int(ends[index] - documents.lengths[index]) + reading.stride.end, int(ends[-1]))
        by_document.append(pd.DataFrame(sums, names, SUMS).to_dict("index"))
        if journal:
            journal.write(by_document[-1])
    frames = {index: pd.DataFrame.from_dict(rows, orient="index") for index, rows in enumerate(by_document)}
    sizes = {"name": list(documents.names), "num_words": documents.num_words, "num_bytes": documents.num_bytes}
    leaks = {selection.name: selection.leaks_the_future for selection in selections}
    return Evaluation(layout.config, pd.DataFrame(sizes), pd.concat(frames).swaplevel(), {BASELINE: False} | leaks)


def _of_stride(reading: StrideReading, name: str, config: HistoryConfig, model_flops: float) -> tuple[float, ...]:
    """The numbers that a stride adds to `SUMS` of a selection."""
    losses, selects = reading.nats[name], reading.stride.selects
    count, nats = len(losses), float(losses.sum(dtype=np.float64))
    count_where_selected, nats_where_selected = count * selects, nats * selects
    if config.first_token == "released_code" and reading.stride.number == 0 and count:
        # The released code counts the first token with the mean loss of the first window's targets.
        count, nats = count + 1, nats + nats / count
    selection_flops = reading.flops.get(name, 0.0)
    return count, count_where_selected, nats, nats_where_selected, model_flops, selection_flops


NUM_RESAMPLES = 10_000
LEVEL = 0.95
ORACLE = "score_oracle"
FORMATS = {"change": "+.2%", "change_where_selected": "+.2%", "share_of_oracle": ".0%"}
"""Format specifications of the figures that are percentages."""
PERPLEXITIES = {"perplexity": "per token", "word_perplexity": "per word", "byte_perplexity": "per byte"}
COMPARISONS = {
    "change": "change of the perplexity",
    "perplexity_where_selected": "perplexity where selected",
    "change_where_selected": "its change",
    "share_of_oracle": "share of the score oracle's gain",
}


@cache
def _drawn(num_documents: int) -> Int[np.ndarray, "resamples documents"]:
    """The number of times that each document is in each resample."""
    raw = np.random.PCG64(0).random_raw(NUM_RESAMPLES * num_documents)
    documents = (raw % np.uint64(num_documents)).astype(np.int64).reshape(NUM_RESAMPLES, num_documents)
    return np.stack([np.bincount(resample, minlength=num_documents) for resample in documents])


def ratio(numerators: Any, denominators: Any) -> Float[np.ndarray, "3"]:
    """sum(numerators) / sum(denominators) over documents, and the ends of its interval (`loss_sums.intervals`).

    All ratios share the resampled documents. The ends are NaN where only one document has a denominator, because all
    resamples would agree with it; or where none has.
    """
    above, below = np.asarray(numerators, np.float64), np.asarray(denominators, np.float64)
    value = above.sum() / below.sum() if below.sum() else math.nan
    several = np.count_nonzero(below) > 1
    ends = intervals(above, below, _drawn(len(below)), LEVEL) if several else (math.nan, math.nan)
    return np.array([value, *ends])


def figures(evaluation: Evaluation) -> pd.DataFrame:
    """The figures of each selection with their intervals (`..._low`, `..._high`), and COSTS per predicted token.

    Perplexities, and their relative change against the baseline on the same documents; `..._where_selected` are those
    of the targets for which spans are selected. `share_of_oracle` is the gain in nats divided by the score oracle's,
    where that is above zero.
    """
    baseline, rows = evaluation.of(BASELINE), {}
    for name, leaks in evaluation.selections.items():
        sums = evaluation.of(name)
        gains, tokens, selected_tokens = baseline - sums, sums["num_tokens"], sums["num_tokens_where_selected"]
        with np.errstate(over="ignore"):
            row = {
                "perplexity": np.exp(ratio(sums["nats"], tokens)),
                "word_perplexity": np.exp(ratio(sums["nats"], evaluation.documents["num_words"])),
                "byte_perplexity": np.exp(ratio(sums["nats"], evaluation.documents["num_bytes"])),
                "perplexity_where_selected": np.exp(ratio(sums["nats_where_selected"], selected_tokens)),
                "change": np.exp(ratio(-gains["nats"], tokens)) - 1,
                "change_where_selected": np.exp(ratio(-gains["nats_where_selected"], selected_tokens)) - 1,
            }
        if ORACLE in evaluation.selections:
            oracle = baseline["nats"] - evaluation.of(ORACLE)["nats"]
            row["share_of_oracle"] = ratio(gains["nats"], oracle) if oracle.sum() > 0 else np.full(3, math.nan)
        ends = {f"{figure}{end}": x for figure, xs in row.items() for end, x in zip(("", "_low", "_high"), xs)}
        rows[name] = {"leaks_the_future": leaks, **ends, **sums[list(COSTS)].sum() / tokens.sum()}
    return pd.DataFrame.from_dict(rows, orient="index")


def with_intervals(rows: pd.DataFrame, figure: str) -> list[str]:
    """A column of `figures` as text, with its intervals where there are any."""
    form, texts = FORMATS.get(figure, ".4g"), []
    for value, low, high in rows[[figure, f"{figure}_low", f"{figure}_high"]].to_numpy(float):
        texts.append(number(value, form) + ("" if math.isnan(low) else f" ({low:{form}} to {high:{form}})"))
    return texts


def tables(saved: Mapping[str, Any], labels: Mapping[str, str] | None = None) -> list[Table]:
    """Perplexities of all selections, their comparison with the baseline, and their costs.

    `saved`: the result of `to_dict`; `labels`: those of the selections that are shown, by their names.
    """
    rows = pd.DataFrame(saved["selections"]).set_index("name")
    labels = labels or {name: name for name in rows.index}
    rows = rows.loc[list(labels)].assign(ratio=rows["selection_flops"] / rows["model_flops"])
    names = [label(labels[name], leaks) for name, leaks in rows["leaks_the_future"].items()]

    def table(title: str, headers: Mapping[str, str]) -> Table:
        present = [figure for figure in headers if figure in rows]
        columns = [with_intervals(rows, figure) for figure in present]
        return Table(title, ("selection", *(headers[figure] for figure in present)), list(zip(names, *columns)))

    documents, most = saved["documents"], saved["config"]["max_candidates"]
    among = f"; the score oracle and selectors choose among {most} random candidates of a stride" if most else ""
    tokens, where = (sum(each[name] for each in documents) for name in ("num_tokens", "num_tokens_where_selected"))
    intervals_over = f"{saved['level']:.0%} intervals over {len(documents)} documents"
    compared = "against the baseline on the same documents; spans are selected for"
    return [
        table(f"perplexity on {tokens:,} tokens, {intervals_over}", PERPLEXITIES),
        table(f"{compared} {where:,} of the tokens{among}", COMPARISONS),
        Table(
            "FLOPs per token: of the model that predicts it, and of the selection",
            ("selection", "of the model", "of the selection", "selection / model"),
            list(zip(names, *([f"{cost:.3g}" for cost in rows[name]] for name in (*COSTS, "ratio")))),
        ),
    ]


def to_dict(evaluation: Evaluation) -> dict[str, Any]:
    """All figures, for JSON, in which NaN is null."""
    frame = figures(evaluation)
    nats = {name: evaluation.of(name)[["nats", "nats_where_selected"]].to_dict("list") for name in frame.index}
    rows: dict[Any, Any] = frame.astype(object).where(frame.notna(), None).to_dict("index")
    counts = evaluation.of(BASELINE)[["num_tokens", "num_tokens_where_selected"]].astype(int)
    return {
        "config": dataclasses.asdict(evaluation.config),
        "level": LEVEL,
        "documents": evaluation.documents.join(counts).to_dict("records"),
        "selections": [{"name": name} | row | nats[name] for name, row in rows.items()],
    }
