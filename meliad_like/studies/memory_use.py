"""How much of what a model predicts comes from what it remembers, and how far back: the cost of other memories.

Clearing is the analysis of Block-Recurrent Transformers, appendix G.1, Figure 5.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int

from meliad_like.errors import UserError
from meliad_like.evaluation.interventions import KINDS, WINDOW, losses_after, part_names
from meliad_like.evaluation.report import with_progress
from meliad_like.studies.loss_sums import FEWEST_DOCUMENTS, RESAMPLES, LossSums
from meliad_like.studies.page import Chart, Series, write_page
from meliad_like.studies.readings import Chosen, StudyRequest, Subject, choose, open_subject, read
from meliad_like.tables import Table, number, signed

MAX_BINS = 64
CONTRAST = "shuffled \N{MINUS SIGN} cleared"


@dataclass(frozen=True)
class Use:
    """The losses of the documents in nats, undisturbed and after each kind of intervention."""

    every: int
    """Tokens from one intervention to the next; the first is at this place of a document."""
    counted: list[Bool[np.ndarray, " targets"]]
    """Which targets cost loss."""
    kept: list[Float[np.ndarray, " targets"]]
    after: dict[str, list[Float[np.ndarray, " targets"]]]

    def costs(self, edges: Int[np.ndarray, " bins+1"]) -> pd.DataFrame:
        """A row for each kind and bin of tokens since the intervention, and for shuffled against cleared memories.

        Its columns: the kind, the bin's `start` and `stop`, the number of `tokens`, their `bits` without (with cleared
        memories), the `cost` of the intervention in bits per token, and its 90 % interval over documents, `low` to
        `high`, or NaN if they are too few.
        """
        kinds = {"kept": self.kept, **self.after}
        since = [np.arange(len(which)) % self.every for which in self.counted]
        # Up to a document's first intervention nothing has changed.
        counted = [(np.arange(len(which)) >= self.every) & which for which in self.counted]
        sums = LossSums.by_bin(edges, since, counted, kinds.values())
        bits = dict(zip(kinds, sums.bits, strict=True))
        compared = {kind: ("kept", kind) for kind in self.after}
        if {"shuffled", "cleared"} <= self.after.keys():
            compared[CONTRAST] = ("cleared", "shuffled")
        frames, few = [], len(self.counted) < FEWEST_DOCUMENTS
        for name, pair in compared.items():
            costs = replace(sums, bits=np.stack([bits[kind] for kind in pair]))
            low, high = np.full((2, len(sums.starts)), np.nan) if few else costs.interval(1)
            columns = {"start": sums.starts, "stop": sums.stops, "tokens": sums.tokens.sum(axis=0)}
            columns |= {"bits": costs.local[0], "cost": costs.gains(1), "low": low, "high": high}
            frames.append(pd.DataFrame({"kind": name} | columns))
        return pd.concat(frames, ignore_index=True)

    @property
    def largest_before(self) -> float:
        """The largest difference in nats before a document's first intervention, where nothing is changed yet."""
        pairs = (pair for other in self.after.values() for pair in zip(self.kept, other, strict=True))
        return max(float(np.abs(ours[: self.every] - theirs[: self.every]).max()) for ours, theirs in pairs)


def run(request: StudyRequest) -> None:
    """Writes the page; UserError if the model remembers nothing, or no document is longer than `every`."""
    subject = open_subject(request.checkpoint, request.gin_param, request.step)
    parts, every = _parts(subject, request), _every(subject, request)
    chosen = _longer(choose([subject], request), every)
    if "shuffled" in request.kind and len(chosen.documents.names) < 2:
        raise UserError("--kind=shuffled needs two documents: choose more of them, or other kinds")
    opened, kept = subject.opened, read(subject, chosen)

    def disturbed(kind: str) -> list[np.ndarray]:
        arguments = (opened.run, opened.model, opened.params, chosen.documents, subject.mesh, kind, parts, every)
        return with_progress(f"{subject.label}, {kind}", lambda report: losses_after(*arguments, report))

    use = Use(every, kept.counted, kept.losses, {kind: disturbed(kind) for kind in request.kind})
    blocks = every // opened.run.model.window_length
    doubling = np.unique(np.minimum(np.append(0, 2 ** np.arange(blocks.bit_length() + 1)), blocks))
    total, by_distance = (use.costs(edges) for edges in (np.array([0, every]), doubling * (every // blocks)))
    fine = use.costs(np.linspace(0, every, min(MAX_BINS, every) + 1).astype(int))
    fine.to_csv(request.output / "use.csv", index=False)
    tables = [_total_table(total), _distance_table(by_distance)]
    (request.output / "use.md").write_text("\n".join(table.to_markdown() for table in tables), encoding="utf-8")
    settings = {"every": every, "parts": parts, "largest_difference_before_nats": use.largest_before}
    frames = {"total": total, "by_distance": by_distance}
    # JSON has no NaN.
    rows = {name: frame.replace({math.nan: None}).to_dict("records") for name, frame in frames.items()}
    chosen.write_summary(request.output, {"model": kept.details(), **settings, **rows})
    write_page(
        request.output / "index.html",
        "memory_use.html",
        title=f"{subject.label}: what is remembered, exchanged every {every:,} tokens",
        chosen=chosen,
        kinds={kind: KINDS[kind].description for kind in request.kind},
        bits=total.bits[0],
        tokens=total.tokens[0],
        contrast=next((row for row in rows["total"] if row["kind"] == CONTRAST), None),
        tables=tables,
        charts=_charts(fine),
        resamples=RESAMPLES,
        fewest=FEWEST_DOCUMENTS,
        details=kept.details(),
        **settings,
    )


def _parts(subject: Subject, request: StudyRequest) -> list[str]:
    """The parts of the carry that are exchanged."""
    model, name = subject.opened.model, f"the model of {request.checkpoint}"
    if reason := model.config.needs_segments:
        raise UserError(
            f"memory_use reads block by block, and what {name} remembers depends on where segments end: change "
            f"{reason} with --gin_param"
        )
    if model.config.overlap:
        raise UserError("memory_use needs windows that repeat nothing: --gin_param='PretrainedConfig.overlap = 0'")
    carry = model.abstract_carry(1)
    found = part_names(model.config, carry)
    if unknown := set(request.part) - set(found):
        raise UserError(f"--part={min(unknown)}: {name} carries {' and '.join(found) or 'nothing'}")
    parts = list(request.part) or [part for part in found if part != WINDOW]
    if not parts:
        way_out = f": --part={WINDOW} exchanges that" if found else ""
        raise UserError(f"memory_use: {name} remembers nothing beyond its window{way_out}")
    return parts


def _every(subject: Subject, request: StudyRequest) -> int:
    every, window = request.every or subject.run.data.segment_length, subject.run.model.window_length
    if every % window:
        raise UserError(f"--every={every} must be a multiple of the window, {window} tokens")
    return every


def _longer(chosen: Chosen, every: int) -> Chosen:
    """The documents in which there is an intervention."""
    (longer,) = np.nonzero(chosen.documents.lengths > every + 1)
    if not len(longer):
        raise UserError(f"--every={every}: none of the documents is longer, so nothing would be exchanged")
    return chosen._replace(documents=chosen.documents.subset(longer))


def _cost(row: Mapping[Any, Any]) -> str:
    interval = f" ({signed(row['low'], 4)} to {signed(row['high'], 4)})" if math.isfinite(row["low"]) else ""
    return signed(row["cost"], 4) + interval


def _total_table(total: pd.DataFrame) -> Table:
    """The loss after each kind of intervention, and what it costs."""
    rows = [("kept", number(total.bits[0], ".4f"), "", "")]
    for row in total.to_dict("records"):
        bits, cost, compared = row["bits"], row["cost"], row["kind"] == CONTRAST
        loss, share = ("", "") if compared else (number(bits + cost, ".4f"), number(cost / bits, ".2%"))
        rows.append((row["kind"], loss, _cost(row), share))
    return Table("", ("memory", "bits per token", "cost, bits per token", "share of the loss"), rows)


def _distance_table(costs: pd.DataFrame) -> Table:
    """The costs by the number of tokens since the intervention, a column for each kind."""
    rows = []
    for start, group in costs.groupby("start"):
        rows.append((f"{start:,} to {group.stop.iloc[0] - 1:,}", *map(_cost, group.to_dict("records"))))
    return Table("", ("tokens since the intervention", *costs.kind.unique()), rows)


def _charts(costs: pd.DataFrame) -> list[Chart]:
    """All kinds in one chart, and each alone with its interval."""
    axes = {"x_label": "tokens since the intervention", "y_label": "cost, bits per token"}
    lines, charts = [], []
    for i, (kind, group) in enumerate(costs.groupby("kind", sort=False), start=1):
        x = (group.start + group.stop) / 2
        lines.append(Series(str(kind), x, group.cost, colour=str(i)))
        if group.low.notna().all():
            band = Series("90% interval over documents", x, group.high, "band", "muted", group.low)
            charts.append(Chart(f"{kind}", series=[Series("mean", x, group.cost, colour=str(i)), band], **axes))
    return [Chart("All kinds", series=lines, **axes), *charts]
