"""The use that a model makes of its memory, and how far back: the cost of other memories.

Clearing is the analysis of Block-Recurrent Transformers, appendix G.1, Figure 5.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int

from meliad_like.errors import UserError
from meliad_like.evaluation.report import with_progress
from meliad_like.studies.frames import signed
from meliad_like.studies.interventions import KINDS, WINDOW, losses_after, part_names
from meliad_like.studies.loss_sums import LossSums
from meliad_like.studies.page import Chart, Numbers, Study
from meliad_like.studies.readings import StudiedModel, StudyRequest, choose, open_studied, read

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


def run(
    request: StudyRequest, *, kind: Sequence[str] = tuple(KINDS), part: Sequence[str] = (), every: int | None = None
) -> Study:
    """The cost of each kind of intervention (`KINDS`): parts of the carry (none: all but the window) are exchanged once
    in `every` tokens (None: a segment). Raises a UserError if the model remembers nothing, or no document is longer."""
    studied = open_studied(request.checkpoint, request.gin_param, request.step)
    opened, window = studied.opened, studied.run.model.window_length
    parts, every = _parts(studied, request.checkpoint, part), every or studied.run.data.segment_length
    if every % window:
        raise UserError(f"--every={every} must be a multiple of the window, {window} tokens")
    selection = choose([studied], request)
    (longer,) = np.nonzero(selection.documents.lengths > every + 1)
    if not len(longer):
        raise UserError(f"--every={every}: none of the documents is longer, so nothing would be exchanged")
    selection = selection._replace(documents=selection.documents.subset(longer))
    if "shuffled" in kind and len(longer) < 2:
        raise UserError("--kind=shuffled needs two documents: choose more of them, or other kinds")
    undisturbed = read(studied, selection)

    def disturbed(kind: str) -> list[np.ndarray]:
        arguments = (opened.run, opened.model, opened.params, selection.documents, opened.mesh, kind, parts, every)
        return with_progress(f"{studied.label}, {kind}", lambda report: losses_after(*arguments, report))

    losses = {"kept": undisturbed.losses, **{each: disturbed(each) for each in kind}}
    blocks = every // window
    doubling = np.unique(np.minimum(np.append(0, 2 ** np.arange(blocks.bit_length() + 1)), blocks)) * window
    fine, total, by_distance = (
        costs(every, undisturbed.counted, losses, edges)
        for edges in (np.linspace(0, every, min(MAX_BINS, every) + 1).astype(int), np.array([0, every]), doubling)
    )
    kinds = [*total["kind"]]
    grid = by_distance.pivot(index="start", columns="kind", values="cost")[kinds].reset_index(names="from")
    formats = {"bits": ".4f", "tokens": ",", **dict.fromkeys(("cost", "low", "high", *kinds), "+.4f")}
    # Before a document's first intervention nothing is changed yet.
    pairs = [pair for each in kind for pair in zip(undisturbed.losses, losses[each], strict=True)]
    difference = max(float(np.abs(ours[:every] - theirs[:every]).max()) for ours, theirs in pairs)
    x, y = "tokens since the intervention", "cost, bits per token"
    intervals = {each: fine[fine["kind"] == each].set_index("start")[["cost", "low", "high"]] for each in kinds}
    return Study(
        title=f"{studied.label}: what is remembered, exchanged every {every:,} tokens",
        lead=[
            "What the model remembers is exchanged for memories of other documents or places, or for empty ones. How "
            "much higher the loss becomes tells how much of what is predicted came from it.",
            f"Two readings of each document are compared. In the second one, {' and '.join(parts)} are exchanged every "
            f"{every:,} tokens, for memories of the first reading or for empty ones. What is not named, such as the "
            "window, is not exchanged. " + " ".join(f"{each}: {KINDS[each].description}." for each in kind),
            *(_contrast(*figures) for figures in total[total["kind"] == CONTRAST][["cost", "low", "high"]].to_numpy()),
        ],
        parts=[
            Numbers(
                "total", "What another memory costs", total.drop(columns=["start", "stop"]), formats,
                "Bits per token; the bits are those without the exchange, and those of cleared memories in the last "
                "row.",
            ),
            Numbers("by_distance", "Cost by the tokens since the intervention", grid, formats, "Bits per token."),
            Chart("costs", "All kinds", fine.pivot(index="start", columns="kind", values="cost")[kinds], x, y),
            *(
                Chart(f"cost_{i}", each, interval, x, y)
                for i, (each, interval) in enumerate(intervals.items())
                if interval.low.notna().all()
            ),
            Numbers("use", "The cost by distance", fine, shown=False),
        ],
        selection=selection,
        details=[undisturbed.details()],
        summary={"every": every, "parts": parts, "largest_difference_before_nats": difference},
        remarks="Earlier than a document's beginning the memory is empty. Before the first exchange in a document all "
        f"losses must be the same: the largest difference there is {difference:.1g} nats, of rounding, because the "
        "second reading is block by block. Intervals are of 90 %, a bootstrap over the documents; fewer than five "
        f"documents have none. Documents of at most {every + 1:,} tokens are left out.",
    )  # fmt: skip


def _contrast(cost: float, low: float, high: float) -> str:
    """A paragraph about the cost of shuffled memories against cleared ones, and its interval, if that is not NaN."""
    interval = "" if math.isnan(low) else f" ({signed(low, 4)} to {signed(high, 4)})"
    if low <= 0 <= high:
        verdict = "Over all distances these documents do not show which effect is larger."
    elif cost > 0:
        verdict = (
            "The first is larger: the model reads from its memory what is particular to a document, and is misled by "
            "that of another."
        )
    else:
        verdict = (
            "The second is larger: so what the model reads from its memory is mostly not particular to the document."
        )
    return (
        f"Another document's memory costs {signed(cost, 4)} bits per token against none{interval}. Two effects "
        "oppose each other: it holds what is wrong here, and it holds what documents have in common, such as their "
        f"language, which an empty one lacks until the model has read on. {verdict}"
    )


def _parts(studied: StudiedModel, checkpoint: str, requested: Sequence[str]) -> list[str]:
    """The parts of the carry that are exchanged."""
    model, name = studied.opened.model, f"the model of {checkpoint}"
    if reason := model.config.traits.needs_segments:
        raise UserError(
            f"memory_use reads block by block, and what {name} remembers depends on where segments end: change "
            f"{reason} with --gin_param"
        )
    if model.config.overlap:
        raise UserError("memory_use needs windows that repeat nothing: --gin_param='PretrainedConfig.overlap = 0'")
    carried = part_names(model.config, model.abstract_carry(1))
    if unknown := set(requested) - set(carried):
        raise UserError(f"--part={min(unknown)}: {name} carries {' and '.join(carried) or 'nothing'}")
    parts = list(requested) or [part for part in carried if part != WINDOW]
    if not parts:
        way_out = f": --part={WINDOW} exchanges that" if carried else ""
        raise UserError(f"memory_use: {name} remembers nothing beyond its window{way_out}")
    return parts
