"""What a recurrent model's gates have learned, and how its states change along a document.

A fixed gate keeps the share g = sigmoid(bias) of each channel of a state and takes in 1 - g of the update, so that what
was taken in fades as g^t: its time constant is -1/log(g) blocks, its half-life log(2) times that. An lstm gate depends
on what is read; its forget gates, averaged over the documents, are turned into time constants in the same way, although
updates of its own size may come in.
"""

import json
from collections.abc import Sequence
from typing import Any
from xml.etree.ElementTree import Element

import jax
import numpy as np
from jaxtyping import Float

from meliad_like.errors import UserError
from meliad_like.evaluation.report import with_progress
from meliad_like.models.decoder_config import DecoderConfig
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
from meliad_like.studies.readings import Chosen, StudyRequest, Subject, choose, open_subject
from meliad_like.studies.state_trace import GATES, LAGS, GateMeans, Trace, Tracer

QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)
SHOWN_LAGS = (1, 8, 64)
MOST_POINTS = 300


def fixed_gates(subject: Subject) -> dict[str, Float[np.ndarray, " d"]]:
    """g = sigmoid(bias) of every channel, by `layer 3 attention_gate` and the like, float64."""
    module = subject.opened.model.bind(subject.opened.params)
    found = {}
    for layer in sorted(subject.run.model.recurrent_indices):  # type: ignore[attr-defined]
        for name in GATES:
            if hasattr(module.layers[layer].cell, name):
                bias = np.asarray(getattr(module.layers[layer].cell, name).bias[...], np.float64)
                found[f"layer {layer} {name}"] = 1 / (1 + np.exp(-bias))
    return found


def time_constants(kept: Float[np.ndarray, " d"]) -> Float[np.ndarray, " d"]:
    """Blocks until 1/e is left of what was taken in, where the share `kept` remains in each block."""
    return -1 / np.log(kept)


def run(request: StudyRequest) -> None:
    """Writes the study into the folder `request.output`.

    Raises:
      UserError: the model has no states; or a checkpoint, store, split or document is missing.
    """
    subject = open_subject(request.checkpoint, request.gin_params, request.step)
    model = subject.run.model
    if not isinstance(model, DecoderConfig) or not model.recurrent_layers:
        raise UserError(f"gates: the model of {request.checkpoint} has no recurrent layer")
    chosen = choose([subject], request)
    if chosen.documents.lengths.max() < model.window_length:
        raise UserError(f"gates: no document has a whole block of {model.window_length} tokens")
    traces, measured = _read(subject, chosen)
    kept = fixed_gates(subject) if model.gate == "fixed" else {name: forget for name, (forget, _) in measured.items()}
    request.output.mkdir(parents=True, exist_ok=True)
    _write_numbers(request, subject, chosen, kept, measured, traces)
    write_page(
        request.output / "index.html",
        f"Gates and states of {subject.label}",
        _lead(subject, chosen),
        [
            section("What the gates have learned", *_gate_parts(kept, measured, model.window_length)),
            section("How states change along a document", *_state_parts(traces, chosen, model.window_length)),
            _facts(subject, chosen),
        ],
    )


def _read(subject: Subject, chosen: Chosen) -> tuple[list[dict[int, Trace]], dict[str, np.ndarray]]:
    tracer, means = Tracer(subject.opened.model), GateMeans()
    params = jax.device_put(subject.opened.params, jax.devices()[0])
    lengths = chosen.documents.lengths.tolist()

    def work(told: Any) -> list[dict[int, Trace]]:
        traces = []
        for document, length in enumerate(lengths):
            traces.append(tracer.read(params, chosen.documents.tokens(document, 0, length), means))
            told(sum(lengths[: document + 1]), sum(lengths))
        return traces

    return with_progress(subject.label, work), means.means()


def _lead(subject: Subject, chosen: Chosen) -> list[Element]:
    model = subject.run.model
    assert isinstance(model, DecoderConfig)
    layers = ", ".join(str(layer) for layer in sorted(model.recurrent_indices))
    return [
        paragraph(
            f"{model.gate}:{model.cell} at layer {layers} of {model.total_layers} (the first is 0): "
            f"{model.num_states} states of {model.model_width} channels, updated every {model.window_length} tokens."
        ),
        tag("p", chosen.title, class_="about"),
    ]


def _gate_parts(kept: dict[str, np.ndarray], measured: dict[str, np.ndarray], window: int) -> list[Element]:
    rows = []
    for name, share in kept.items():
        blocks = np.quantile(time_constants(share), QUANTILES)
        rows.append((_title(name), f"{share.mean():.3f}", *(f"{x:,.3g}" for x in blocks)))
    header = ("time constants, blocks", "mean g", "shortest", "10%", "median", "90%", "longest")
    note = (
        f"A block is {window} tokens. g is the share of a state that a block leaves; the time constant is −1/log(g), "
        "and after 0.69 of it half is left."
    )
    if measured:
        note += " These gates depend on what is read: g is the forget gate, averaged over states and blocks."
    return [
        table(header, rows, note),
        *(figure(_histogram(name, share, window)) for name, share in kept.items()),
        *([_lstm_table(measured)] if measured else []),
    ]


def _histogram(name: str, kept: np.ndarray, window: int) -> Chart:
    blocks = time_constants(kept)
    low, high = np.log10(blocks.min()), np.log10(blocks.max())
    edges = np.logspace(low - 0.02, high + 0.02, min(40, max(8, kept.size // 4)) + 1)
    return Chart(
        title=f"Time constants of the channels: {_title(name)}",
        x_label="time constant, blocks",
        y_label="channels",
        series=[Series("channels", edges, np.histogram(blocks, edges)[0], "bars")],
        caption=f"The median is {np.median(blocks):,.3g} blocks, {np.median(blocks) * window:,.0f} tokens; its "
        f"half-life is {np.log(2) * np.median(blocks):,.3g} blocks.",
        log_x=True,
    )


def _lstm_table(measured: dict[str, np.ndarray]) -> Element:
    rows = []
    for name, gates in measured.items():
        for kind, values in zip(("forget", "input"), gates, strict=True):
            quantiles = np.quantile(values, QUANTILES)
            rows.append((f"{_title(name)}, {kind}", f"{values.mean():.3f}", *(f"{x:.3f}" for x in quantiles)))
    return table(("measured gates, by channel", "mean", "lowest", "10%", "median", "90%", "highest"), rows)


def _state_parts(traces: list[dict[int, Trace]], chosen: Chosen, window: int) -> list[Element]:
    layers = list(traces[0])
    by_lag = []
    for i, layer in enumerate(layers):
        similarity = np.concatenate([trace[layer].similarity for trace in traces], axis=1)
        there = ~np.isnan(similarity).all(axis=1)
        means = np.nanmean(similarity[there], axis=1)
        by_lag.append(Series(f"layer {layer}", np.array(LAGS)[there], means, colour=str(i % 5 + 1)))
    lags = Chart(
        title="How like themselves states stay",
        x_label="blocks between",
        y_label="mean cosine",
        series=by_lag,
        caption="Of a state vector with the same one so many blocks before; over all documents, blocks and states.",
        log_x=True,
    )
    parts = []
    for index, trace in enumerate(traces):
        charts = [chart for layer in layers for chart in _state_charts(layer, trace[layer], window)]
        parts.append(document_part(index, *map(figure, charts)))
    return [figure(lags), document_choice(chosen.documents.names, chosen.documents.lengths), *parts]


def _state_charts(layer: int, trace: Trace, window: int) -> list[Chart]:
    if not trace.change.size:
        return []
    stretch = -(-trace.change.size // MOST_POINTS)
    starts = np.arange(0, trace.change.size, stretch)
    x = starts * window

    def mean(values: np.ndarray) -> np.ndarray:
        # A stretch has no mean unless all of its blocks have a value.
        return np.add.reduceat(values, starts) / np.diff(np.append(starts, values.size))

    similar = []
    for i, lag in enumerate(SHOWN_LAGS):
        name = f"{lag} block{'s' if lag > 1 else ''} before"
        similar.append(Series(name, x, mean(trace.similarity[LAGS.index(lag)]), colour=str(i + 1)))
    note = f"Each point is the mean of {stretch} blocks." if stretch > 1 else ""
    return [
        Chart(
            title=f"Change of the states in a block: layer {layer}",
            x_label="token",
            y_label="norm of the change / norm",
            series=[Series("", x, mean(trace.change))],
            caption=note,
        ),
        Chart(
            title=f"Similarity of the states: layer {layer}",
            x_label="token",
            y_label="mean cosine",
            series=[*similar, Series("the initial ones", x, mean(trace.from_initial), colour="muted")],
            caption=f"With the same states some blocks before, and with those that every document begins with. {note}",
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
    traces: Sequence[dict[int, Trace]],
) -> None:
    arrays = {f"{name} kept": share for name, share in kept.items()}
    arrays |= {f"{name} forget and input": values for name, values in measured.items()}
    for index, trace in enumerate(traces):
        for layer, one in trace.items():
            prefix = f"document {index} layer {layer}"
            arrays |= {
                f"{prefix} change": one.change,
                f"{prefix} from initial": one.from_initial,
                f"{prefix} similarity": one.similarity,
            }
    np.savez_compressed(request.output / "gates.npz", lags=np.array(LAGS), **arrays)
    saved = {
        "model": subject.details(),
        "split": chosen.split_name,
        "store": chosen.store.fingerprint,
        "documents": list(chosen.documents.names),
        "quantiles": QUANTILES,
        "time_constants_blocks": {
            name: np.quantile(time_constants(share), QUANTILES).tolist() for name, share in kept.items()
        },
    }
    (request.output / "summary.json").write_text(json.dumps(saved, indent=2) + "\n")
