"""A model whose states are cleared every k tokens, against the same model (appendix G.1, Figure 5)."""

from collections.abc import Sequence

import numpy as np

from meliad_like.config import with_changes
from meliad_like.errors import UserError
from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.model import Model
from meliad_like.studies.compare import write_comparison
from meliad_like.studies.page import Chart, Series
from meliad_like.studies.readings import Reading, StudyRequest, choose, open_subject, read

MAX_BINS = 64


def run(request: StudyRequest) -> None:
    """Writes the page; UserError if there are no states, k is no multiple of the window, or no document is longer."""
    subject = open_subject(request.checkpoint, request.gin_param, request.step)
    model = subject.run.model
    cleared_model = model.cleared() if isinstance(model, DecoderConfig) else None
    if cleared_model is None:
        raise UserError(f"clear_state: the model of {request.checkpoint} has no states to clear")
    every, window = request.clear_every or subject.run.data.segment_length, model.window_length
    if every % window:
        raise UserError(f"--clear_every={every} must be a multiple of the window, {window} tokens")
    chosen = choose([subject], request)
    if chosen.documents.lengths.max() <= every + 1:
        raise UserError(f"--clear_every={every}: none of the documents is longer, so nothing would be cleared")
    segments = {"data.segment_length": every, "data.tokens_per_step": every * subject.run.data.num_lanes}

    def read_with(model: DecoderConfig, label: str) -> Reading:
        run = with_changes(subject.run, segments | {"model": model})
        opened = subject.opened._replace(run=run, model=Model(model, subject.opened.vocabulary.size))
        return read(subject._replace(opened=opened, label=label), chosen)

    kept, cleared = read_with(model, "states kept"), read_with(cleared_model, f"states cleared every {every:,} tokens")
    gains = [theirs - ours for ours, theirs in zip(kept.losses, cleared.losses, strict=True)]
    largest = max(float(np.abs(gain[:every]).max()) for gain in gains)
    edges, means = _by_position(gains, every)
    by_position = Chart(
        title="Gain of keeping the states, by position since they were cleared",
        x_label="tokens since the states were cleared",
        y_label="gain, bits per token",
        series=[Series("better with states|worse with states", edges, means, "bars", "sign")],
        caption=f"Mean over all segments of {every:,} tokens, without the first of each document, before which nothing "
        "is cleared.",
    )
    early, late = None, None
    if means.sum() > 0:
        early, late = (part.sum() / means.sum() for part in (means[: len(means) // 8], means[len(means) // 2 :]))
    write_comparison(
        request,
        chosen,
        kept,
        cleared,
        f"{subject.label}: states kept against cleared every {every:,} tokens",
        {
            "clear_every": every,
            "largest_difference_in_the_first_segment_nats": largest,
            "gain_by_position_in_segment_bits": [edges.tolist(), means.tolist()],
        },
        "clear_state.html",
        clear_every=every,
        every=every,
        largest=largest,
        by_position=by_position,
        early=early,
        late=late,
    )


def _by_position(gains: Sequence[np.ndarray], every: int) -> tuple[np.ndarray, np.ndarray]:
    """The mean gain in bits by the number of tokens since the last clearing: edges of at most MAX_BINS bins, means."""
    edges = np.linspace(0, every, min(MAX_BINS, every) + 1).astype(int)
    position = np.concatenate([np.arange(every, gain.size) % every for gain in gains])
    later = np.concatenate([gain[every:].astype(np.float64) for gain in gains]) / np.log(2)
    sums, counts = np.histogram(position, edges, weights=later)[0], np.histogram(position, edges)[0]
    return edges, sums / np.maximum(counts, 1)
