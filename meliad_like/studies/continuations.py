"""What passes from window to window: greedy continuations with and without what a model remembers of the context.

Adding Recurrence to Pretrained Transformers (Yoshida et al. 2020), section 5.3: a model reads whole windows of a
document and continues in the next window, which only its memory reaches. It also writes without a memory: after the
same first token (which the context's window predicts), as if a document began there.
"""

import math
import re
import statistics
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element

import numpy as np
from jaxtyping import Int

from meliad_like.data.vocabulary import Vocabulary
from meliad_like.errors import UserError
from meliad_like.generation.sampling import SamplingConfig
from meliad_like.generation.streaming import Generator
from meliad_like.generation.streaming import Reading as Place
from meliad_like.studies.page import (
    document_choice,
    document_part,
    facts_table,
    paragraph,
    section,
    table,
    tag,
    write_page,
)
from meliad_like.studies.readings import (
    Chosen,
    StudyRequest,
    Subject,
    choose,
    open_subject,
    with_distinct_labels,
    write_summary,
)

TOPICAL = re.compile(r"[^\W\d_]{5,}")
REMEMBERED, FORGOTTEN = "with the memory of the context", "without it"


class Passage(NamedTuple):
    """A context in a document, and the models' continuations."""

    document: int
    """Index among the chosen ones."""
    start: int
    """First token of the context in its document."""
    context: str
    original: str
    """The document's own continuation."""
    written: dict[str, dict[str, str]]
    """Continuations by the model's label, then by REMEMBERED or FORGOTTEN."""


def run(request: StudyRequest) -> None:
    """Writes the study into the folder `request.output`.

    Raises:
      UserError: a model's windows overlap, the context is not of whole windows, no document is long enough, or a
        checkpoint, store, split or document is missing.
    """
    subjects = [open_subject(request.checkpoint, request.gin_params, request.step)]
    subjects += [open_subject(folder, request.gin_params, request.other_step) for folder in request.others]
    subjects = with_distinct_labels(subjects)
    context_tokens = request.context_tokens or subjects[0].run.model.window_length
    for subject in subjects:
        _check(subject, context_tokens)
    chosen = choose(subjects, request)
    places = _places(chosen, context_tokens + request.num_tokens, request.num_contexts)
    if not places:
        raise UserError(
            f"no document has the {context_tokens + request.num_tokens:,} tokens of a context and its continuation: "
            "lower --context_tokens or --num_tokens"
        )
    writers = {subject.label: _Writer(subject, context_tokens, request.num_tokens) for subject in subjects}
    vocabulary = chosen.store.vocabulary
    passages = []
    for document, start in places:
        stop = start + context_tokens + request.num_tokens
        tokens = chosen.documents.tokens(document, start, stop)
        context, original = np.split(tokens, [context_tokens])
        written = {label: write(context, vocabulary) for label, write in writers.items()}
        passages.append(Passage(document, start, vocabulary.decode(context), vocabulary.decode(original), written))
    _write(request, subjects, chosen, passages, context_tokens)


def shared_words(context: str, continuation: str) -> float:
    """The share of a continuation's distinct words (of five letters or more) that occur in the context; NaN of none."""
    words = {word.lower() for word in TOPICAL.findall(continuation)}
    known = {word.lower() for word in TOPICAL.findall(context)}
    return len(words & known) / len(words) if words else float("nan")


class _Writer:
    """Continues contexts with one model; compiled once, because all contexts have the same length."""

    def __init__(self, subject: Subject, context_tokens: int, num_tokens: int):
        opened = subject.opened
        self._params, self._num_tokens = opened.params, num_tokens
        self._generator = Generator(
            opened.model,
            opened.params,
            segment_length=context_tokens,
            end_of_document=opened.vocabulary.end_of_document,
            sampling=SamplingConfig(temperature=0.0),
            stop_at_end=False,
        )

    def __call__(self, context: Int[np.ndarray, " n"], vocabulary: Vocabulary) -> dict[str, str]:
        """The continuations by REMEMBERED and FORGOTTEN."""
        read = self._generator.read
        remembered = self._continue(read(self._generator.begin(0), context), self._num_tokens)
        first = remembered[:1]
        forgotten = first + self._continue(read(self._generator.begin(0), np.array(first)), self._num_tokens - 1)
        return {REMEMBERED: vocabulary.decode(remembered), FORGOTTEN: vocabulary.decode(forgotten)}

    def _continue(self, place: Place, num_tokens: int) -> list[int]:
        return [token for tokens, _ in self._generator.write(place, num_tokens) for token in tokens]


def _check(subject: Subject, context_tokens: int) -> None:
    if overlap := subject.opened.model.config.overlap:
        raise UserError(
            f"{subject.label}: windows that repeat {overlap} tokens see these besides what is remembered; "
            "--gin_param='PretrainedConfig.overlap = 0' reads separate windows"
        )
    window = subject.run.model.window_length
    if context_tokens % window:
        raise UserError(f"--context_tokens={context_tokens} must be a multiple of {subject.label}'s window, {window}")


def _places(chosen: Chosen, length: int, most: int) -> list[tuple[int, int]]:
    """(document, first token) of passages of `length` tokens: in each document up to `most`, evenly spread."""
    places = []
    for document, size in enumerate(chosen.documents.lengths.tolist()):
        # The last token is the end of the document.
        room = size - 1 - length
        number = min(most, room // length + 1) if room >= 0 else 0
        places += [(document, room * (i + 1) // (number + 1)) for i in range(number)]
    return places


def _write(
    request: StudyRequest, subjects: list[Subject], chosen: Chosen, passages: list[Passage], context_tokens: int
) -> None:
    shares = {"the document itself": [shared_words(passage.context, passage.original) for passage in passages]}
    for label in passages[0].written:
        for way in (REMEMBERED, FORGOTTEN):
            shares[f"{label}, {way}"] = [shared_words(p.context, p.written[label][way]) for p in passages]
    known = {name: [value for value in values if not math.isnan(value)] for name, values in shares.items()}
    means = {name: statistics.fmean(values) for name, values in known.items() if values}
    details: dict[str, Any] = {
        "models": [subject.details() for subject in subjects],
        "documents": chosen.description,
        "context_tokens": context_tokens,
        "num_tokens": request.num_tokens,
        "shared_words": means,
        "passages": [passage._asdict() | {"name": chosen.documents.names[passage.document]} for passage in passages],
    }
    request.output.mkdir(parents=True, exist_ok=True)
    write_summary(request.output, chosen, details, "continuations.json")
    seen = {s.label: int(s.opened.model.config.num_visible(np.array(context_tokens))) - 1 for s in subjects}
    visible = "; ".join(f"{label}: {number:,} tokens" if number else f"{label}: none" for label, number in seen.items())
    lead = [
        paragraph(
            f"Contexts of {context_tokens:,} tokens are read as documents of their own; the models then write the "
            f"{request.num_tokens:,} most likely tokens, one after the other (greedily, which soon repeats itself). "
            f"What the first of them sees of the context directly, besides the memory: {visible}. Without the memory, "
            "the same first token begins a document."
        ),
        tag("p", chosen.description, class_="about"),
    ]
    rows = [(name, f"{share:.1%}") for name, share in means.items()]
    note = "Of the different words of five letters or more in a continuation; mean over all contexts."
    used = sorted({passage.document for passage in passages})
    parts = [
        document_part(i, *(_passage(passage) for passage in passages if passage.document == document))
        for i, document in enumerate(used)
    ]
    names = [chosen.documents.names[document] for document in used]
    write_page(
        request.output / "index.html",
        "What passes from window to window",
        lead,
        [
            section("Words that the context has too", table(("continuation", "share"), rows, note)),
            section("Continuations", document_choice(names, chosen.documents.lengths[used].tolist()), *parts),
            section("Models", facts_table([subject.details() for subject in subjects], ("", *seen))),
        ],
    )


def _passage(passage: Passage) -> Element:
    columns = [("the document's own continuation", passage.original)]
    for label, ways in passage.written.items():
        columns += [(f"{label}, {way}", text) for way, text in ways.items()]
    cells = [tag("div", tag("h4", title), tag("p", text, class_="passage")) for title, text in columns]
    context = tag("details", tag("summary", "the whole context"), tag("p", passage.context, class_="passage"))
    ending = tag("p", f"… {passage.context[-300:]}", class_="passage")
    title = f"from token {passage.start:,} on"
    return section(title, ending, context, tag("div", *cells, class_="columns"), level=3)
