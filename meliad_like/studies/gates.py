"""What the gates of a model have learned, and how its states change along a document.

A gate keeps the share g of each channel of a state in each block, so that the share g^t of an update is left after t
blocks: its time constant is -1/log(g) blocks, its half-life log(2) times that. A fixed gate has one g for each channel;
an lstm gate depends on what is read, and its g is averaged over the documents.
"""

from collections.abc import Callable, Sequence
from xml.etree.ElementTree import Element

import jax
import numpy as np
from jaxtyping import Float

from meliad_like.errors import UserError
from meliad_like.evaluation.report import with_progress
from meliad_like.studies.page import (
    Chart,
    Series,
    document_choice,
    document_part,
    facts_table,
    figure,
    paragraph,
    section,
    table,
    tag,
    write_page,
)
from meliad_like.studies.readings import Chosen, StudyRequest, Subject, choose, open_subject, write_summary
from meliad_like.studies.state_trace import LAGS, Gates, Trace, Tracer

QUANTILES = {"lowest": 0.0, "10%": 0.1, "median": 0.5, "90%": 0.9, "highest": 1.0}
SHOWN_LAGS = (1, 8, 64)
MOST_POINTS = 300


def time_constants(kept: Float[np.ndarray, " d"]) -> Float[np.ndarray, " d"]:
    """Blocks until 1/e of an update is left, if each block keeps the share `kept`."""
    return -1 / np.log(kept)


def run(request: StudyRequest) -> None:
    """Writes the study into the folder `request.output`.

    Raises:
      UserError: the model has no states; or a checkpoint, store, split or document is missing.
    """
    subject = open_subject(request.checkpoint, request.gin_params, request.step)
    model = subject.run.model
    chosen = choose([subject], request)
    if chosen.documents.lengths.max() < model.window_length:
        raise UserError(f"gates: no document has a whole block of {model.window_length} tokens")
    traces, gates = _read(subject, chosen)
    if not traces[0]:
        raise UserError(f"gates: the model of {request.checkpoint} has no states that pass from block to block")
    kept = {name: forget for name, (forget, _) in gates.means().items()}
    measured = {name: values for name, values in gates.means().items() if name in gates.varying}
    request.output.mkdir(parents=True, exist_ok=True)
    _write_numbers(request, subject, chosen, kept, measured, traces)
    write_page(
        request.output / "index.html",
        f"Gates and states of {subject.label}",
        _lead(traces, chosen, model.window_length),
        [
            *_gate_section(kept, measured, model.window_length),
            section("How states change along a document", *_state_parts(traces, chosen, model.window_length)),
            _facts(subject, chosen),
        ],
    )


def _read(subject: Subject, chosen: Chosen) -> tuple[list[dict[str, Trace]], Gates]:
    tracer, gates = Tracer(subject.opened.model), Gates()
    params = jax.device_put(subject.opened.params, jax.devices()[0])
    lengths = chosen.documents.lengths.tolist()

    def work(on_progress: Callable[[int, int], None]) -> list[dict[str, Trace]]:
        traces = []
        for document, length in enumerate(lengths):
            traces.append(tracer.read(params, chosen.documents.tokens(document, 0, length), gates))
            on_progress(sum(lengths[: document + 1]), sum(lengths))
        return traces

    return with_progress(subject.label, work), gates


def _lead(traces: Sequence[dict[str, Trace]], chosen: Chosen, window: int) -> list[Element]:
    shapes = {_title(name): trace.shape for name, trace in traces[0].items()}
    states = ", ".join(
        f"{name} ({number} states of {channels} channels)" for name, (number, channels) in shapes.items()
    )
    return [
        paragraph(f"States that are updated every {window} tokens: {states}. Layers count from 0."),
        tag("p", chosen.title, class_="about"),
    ]


def _gate_section(kept: dict[str, np.ndarray], measured: dict[str, np.ndarray], window: int) -> list[Element]:
    """The section, if there are gates."""
    if not kept:
        return []
    note = (
        f"A block is {window} tokens. g is the share of a state that a block leaves; the time constant is −1/log(g), "
        "and after 0.69 of it half is left."
    )
    if measured:
        note += " These gates depend on what is read: g is the forget gate, averaged over states and blocks."
    constants = {name: time_constants(share) for name, share in kept.items()}
    parts = [table(*_quantiles("time constants, blocks", constants, ",.3g", {"mean g": kept}), note)]
    parts += [figure(_histogram(name, blocks, window)) for name, blocks in constants.items()]
    if measured:
        kinds = ("forget", "input")
        gates = {f"{name}, {kinds[i]}": values for name, both in measured.items() for i, values in enumerate(both)}
        parts.append(table(*_quantiles("measured gates, by channel", gates, ".3f", {"mean": gates})))
    return [section("What the gates have learned", *parts)]


def _quantiles(
    title: str, arrays: dict[str, np.ndarray], form: str, averaged: dict[str, dict[str, np.ndarray]]
) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
    """Header and rows of a table with a line for each array: its name, means, and its quantiles."""
    header = (title, *averaged, *QUANTILES)
    rows = []
    for name, values in arrays.items():
        means = (f"{of[name].mean():.3f}" for of in averaged.values())
        rows.append((_title(name), *means, *(f"{x:{form}}" for x in np.quantile(values, [*QUANTILES.values()]))))
    return header, rows


def _histogram(name: str, blocks: np.ndarray, window: int) -> Chart:
    low, high = np.log10(blocks.min()), np.log10(blocks.max())
    edges = np.logspace(low - 0.02, high + 0.02, min(40, max(8, blocks.size // 4)) + 1)
    return Chart(
        title=f"Time constants of the channels: {_title(name)}",
        x_label="time constant, blocks",
        y_label="channels",
        series=[Series("channels", edges, np.histogram(blocks, edges)[0], "bars")],
        caption=f"The median is {np.median(blocks):,.3g} blocks, {np.median(blocks) * window:,.0f} tokens; its "
        f"half-life is {np.log(2) * np.median(blocks):,.3g} blocks.",
        log_x=True,
    )


def _state_parts(traces: list[dict[str, Trace]], chosen: Chosen, window: int) -> list[Element]:
    layers = list(traces[0])
    by_lag = []
    for i, layer in enumerate(layers):
        similarity = np.concatenate([trace[layer].similarity for trace in traces], axis=1)
        there = ~np.isnan(similarity).all(axis=1)
        means = np.nanmean(similarity[there], axis=1)
        by_lag.append(Series(_title(layer), np.array(LAGS)[there], means, colour=str(i % 5 + 1)))
    lags = Chart(
        title="Similarity of the states over time",
        x_label="blocks between",
        y_label="mean cosine",
        series=by_lag,
        caption="Of a state vector with itself, this number of blocks before; over all documents, blocks and states.",
        log_x=True,
    )
    parts = []
    for index, trace in enumerate(traces):
        charts = [chart for layer in layers for chart in _state_charts(layer, trace[layer], window)]
        parts.append(document_part(index, *map(figure, charts)))
    return [figure(lags), document_choice(chosen.documents.names, chosen.documents.lengths), *parts]


def _state_charts(layer: str, trace: Trace, window: int) -> list[Chart]:
    if not trace.change.size:
        return []
    blocks = -(-trace.change.size // MOST_POINTS)
    starts = np.arange(0, trace.change.size, blocks)
    x = starts * window

    def mean(values: np.ndarray) -> np.ndarray:
        # A point has no mean unless all of its blocks have a value.
        return np.add.reduceat(values, starts) / np.diff(np.append(starts, values.size))

    similar = []
    for i, lag in enumerate(SHOWN_LAGS):
        name = f"{lag} block{'s' if lag > 1 else ''} before"
        similar.append(Series(name, x, mean(trace.similarity[LAGS.index(lag)]), colour=str(i + 1)))
    note = f"Each point is the mean of {blocks} blocks." if blocks > 1 else ""
    return [
        Chart(
            title=f"Change of the states in a block: {_title(layer)}",
            x_label="token",
            y_label="norm of the change / norm",
            series=[Series("", x, mean(trace.change))],
            caption=note,
        ),
        Chart(
            title=f"Similarity of the states: {_title(layer)}",
            x_label="token",
            y_label="mean cosine",
            series=[*similar, Series("the initial ones", x, mean(trace.from_initial), colour="muted")],
            caption=f"With the same states some blocks before, and with the initial states. {note}",
        ),
    ]


def _facts(subject: Subject, chosen: Chosen) -> Element:
    return section(
        "What was read",
        facts_table([subject.details()], ("", "model")),
        tag(
            "p",
            f"Documents: {chosen.description}. Whole blocks only; each document begins with the initial states.",
            class_="about",
        ),
    )


def _title(name: str) -> str:
    return name.replace("_", " ")


def _write_numbers(
    request: StudyRequest,
    subject: Subject,
    chosen: Chosen,
    kept: dict[str, np.ndarray],
    measured: dict[str, np.ndarray],
    traces: Sequence[dict[str, Trace]],
) -> None:
    arrays = {f"{name} kept": share for name, share in kept.items()}
    arrays |= {f"{name} forget and input": values for name, values in measured.items()}
    for index, trace in enumerate(traces):
        for layer, one in trace.items():
            for name in ("change", "from_initial", "similarity"):
                arrays[f"document {index} {layer} {_title(name)}"] = getattr(one, name)
    np.savez_compressed(request.output / "gates.npz", lags=np.array(LAGS), **arrays)
    quantiles = [*QUANTILES.values()]
    constants = {name: np.quantile(time_constants(share), quantiles).tolist() for name, share in kept.items()}
    names = list(chosen.documents.names)
    details = {"documents": names, "quantiles": quantiles, "time_constants_blocks": constants}
    write_summary(request.output, chosen, {"model": subject.details()} | details)
