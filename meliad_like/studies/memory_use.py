"""How much of what a model predicts comes from what it remembers, and how far back: the cost of other memories.

Clearing is the analysis of Block-Recurrent Transformers, appendix G.1, Figure 5.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int

from meliad_like.errors import UserError
from meliad_like.evaluation.report import with_progress
from meliad_like.studies.interventions import KINDS, WINDOW, losses_after, part_names
from meliad_like.studies.loss_sums import LossSums
from meliad_like.studies.page import write_page
from meliad_like.studies.readings import StudyRequest, Subject, choose, open_subject, read
from meliad_like.tables import Table

MAX_BINS = 64
CONTRAST = "shuffled \N{MINUS SIGN} cleared"


def costs(
    every: int,
    counted: Sequence[Bool[np.ndarray, " targets"]],
    losses: Mapping[str, Sequence[Float[np.ndarray, " targets"]]],
    edges: Int[np.ndarray, " bins+1"],
) -> pd.DataFrame:
    """A row for each kind and bin of tokens since the intervention, and for shuffled against cleared memories.

    Args:
        every: tokens from one intervention to the next; the first is at this place of a document.
        counted: which targets cost loss, by document.
        losses: of the documents, in nats: `kept`, the undisturbed ones, and those after each kind of intervention.
        edges: the edges of the bins.

    Returns:
        The `kind`, the bin's `start` and `stop`, the number of `tokens`, their `bits` without (with cleared memories),
        the `cost` of the intervention in bits per token, and its 90 % interval over documents, `low` to `high`, or NaN
        if they are too few.
    """
    since = [np.arange(len(which)) % every for which in counted]
    # Up to a document's first intervention nothing has changed.
    exchanged = [(np.arange(len(which)) >= every) & which for which in counted]
    sums, kinds = LossSums.by_bin(edges, since, exchanged, losses.values()), [*losses]
    compared = {kind: ("kept", kind) for kind in kinds if kind != "kept"}
    if {"shuffled", "cleared"} <= losses.keys():
        compared[CONTRAST] = ("cleared", "shuffled")
    frames = []
    for name, pair in compared.items():
        reference, other = map(kinds.index, pair)
        columns = {"kind": name, "start": sums.starts, "stop": sums.stops, "tokens": sums.tokens.sum(axis=0)}
        gains = {"low": math.nan, "high": math.nan} | sums.gains(reference, other)
        columns |= {"bits": sums.local[reference], "cost": gains.pop("gain"), **gains}
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True)


def run(request: StudyRequest) -> None:
    """Writes the page, `use.csv` and `summary.json`.

    Raises a UserError if the model remembers nothing, or no document is longer than `every`.
    """
    subject = open_subject(request.checkpoint, request.gin_param, request.step)
    opened, window = subject.opened, subject.run.model.window_length
    parts, every = _parts(subject, request), request.every or subject.run.data.segment_length
    if every % window:
        raise UserError(f"--every={every} must be a multiple of the window, {window} tokens")
    selection = choose([subject], request)
    (longer,) = np.nonzero(selection.documents.lengths > every + 1)
    if not len(longer):
        raise UserError(f"--every={every}: none of the documents is longer, so nothing would be exchanged")
    selection = selection._replace(documents=selection.documents.subset(longer))
    if "shuffled" in request.kind and len(longer) < 2:
        raise UserError("--kind=shuffled needs two documents: choose more of them, or other kinds")
    undisturbed = read(subject, selection)

    def disturbed(kind: str) -> list[np.ndarray]:
        arguments = (opened.run, opened.model, opened.params, selection.documents, opened.mesh, kind, parts, every)
        return with_progress(f"{subject.label}, {kind}", lambda report: losses_after(*arguments, report))

    losses = {"kept": undisturbed.losses, **{kind: disturbed(kind) for kind in request.kind}}
    blocks = every // window
    doubling = np.unique(np.minimum(np.append(0, 2 ** np.arange(blocks.bit_length() + 1)), blocks)) * window
    fine, total, by_distance = (
        costs(every, undisturbed.counted, losses, edges)
        for edges in (np.linspace(0, every, min(MAX_BINS, every) + 1).astype(int), np.array([0, every]), doubling)
    )
    fine.to_csv(request.output / "use.csv", index=False)
    kinds = [*total["kind"]]
    grid = by_distance.pivot(index="start", columns="kind", values="cost")[kinds].reset_index(names="from")
    formats = {"bits": ".4f", "tokens": ",", **dict.fromkeys(("cost", "low", "high", *kinds), "+.4f")}
    tables = [Table.of(frame, formats=formats) for frame in (total.drop(columns=["start", "stop"]), grid)]
    # Before a document's first intervention nothing is changed yet.
    pairs = [pair for kind in request.kind for pair in zip(undisturbed.losses, losses[kind], strict=True)]
    difference = max(float(np.abs(ours[:every] - theirs[:every]).max()) for ours, theirs in pairs)
    settings = {"every": every, "parts": parts, "largest_difference_before_nats": difference}
    frames = {"total": total, "by_distance": by_distance}
    # JSON has no NaN.
    rows = {name: frame.replace({math.nan: None}).to_dict("records") for name, frame in frames.items()}
    write_page(
        request.output,
        "memory_use",
        {**settings, **rows},
        title=f"{subject.label}: what is remembered, exchanged every {every:,} tokens",
        selection=selection,
        details=[undisturbed.details()],
        kinds={kind: KINDS[kind].description for kind in request.kind},
        bits=total.bits[0],
        tokens=total.tokens[0],
        contrast=next((row for row in rows["total"] if row["kind"] == CONTRAST), None),
        tables=tables,
        costs=fine.pivot(index="start", columns="kind", values="cost")[kinds],
        intervals={kind: fine[fine["kind"] == kind].set_index("start")[["cost", "low", "high"]] for kind in kinds},
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
    carried = part_names(model.config, model.abstract_carry(1))
    if unknown := set(request.part) - set(carried):
        raise UserError(f"--part={min(unknown)}: {name} carries {' and '.join(carried) or 'nothing'}")
    parts = list(request.part) or [part for part in carried if part != WINDOW]
    if not parts:
        way_out = f": --part={WINDOW} exchanges that" if carried else ""
        raise UserError(f"memory_use: {name} remembers nothing beyond its window{way_out}")
    return parts
