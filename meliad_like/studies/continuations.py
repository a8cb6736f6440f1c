"""What passes from window to window: greedy continuations with and without what a model remembers of the context.

Adding Recurrence to Pretrained Transformers (Yoshida et al. 2020), section 5.3: a model reads whole windows of a
document and continues in the next window, which only its memory reaches. It also writes without a memory: after the
same first token (which the context's window predicts), as if a document began there.
"""

import re
from collections.abc import Callable

import numpy as np
import pandas as pd
from jaxtyping import Int

from meliad_like.errors import UserError
from meliad_like.generation.streaming import Generator, SamplingConfig
from meliad_like.studies.page import write_page
from meliad_like.studies.readings import StudyRequest, Subject, choose, open_compared
from meliad_like.tables import Table

TOPICAL = re.compile(r"[^\W\d_]{5,}")
REMEMBERED, FORGOTTEN = "with the memory of the context", "without it"
OWN = "the document itself"


def run(request: StudyRequest) -> None:
    """Writes the page; UserError if windows overlap, a context is not whole windows, or no document is long enough."""
    subjects = open_compared(request, change_all=True)
    num_context = request.context_tokens or subjects[0].run.model.window_length
    for subject in subjects:
        _check(subject, num_context)
    selection = choose(subjects, request)
    documents, decode, length = selection.documents, selection.store.vocabulary.decode, num_context + request.num_tokens
    places = _places(documents.lengths, length, request.num_contexts)
    writers = {subject.label: _writer(subject, num_context, request.num_tokens) for subject in subjects}
    passages, texts = [], []
    for document, start in places:
        context, original = np.split(documents.tokens(document, start, start + length), [num_context])
        passage = {"document": document, "start": start, "context": decode(context), "original": decode(original)}
        written = {label: write(context) for label, write in writers.items()}
        passages.append(passage | {"written": written, "name": documents.names[document]})
        texts.append({f"{label}, {how}": text for label, by in written.items() for how, text in by.items()})
    shares = pd.DataFrame(
        {title: shared_words(passage["context"], text) for title, text in {OWN: passage["original"], **by}.items()}
        for passage, by in zip(passages, texts, strict=True)
    )
    means, details = shares.mean().dropna().to_dict(), [subject.details() for subject in subjects]
    settings = {"context_tokens": num_context, "num_tokens": request.num_tokens}
    write_page(
        request.output,
        "continuations",
        {**settings, "shared_words": means, "passages": passages},
        title="What passes from window to window",
        selection=selection,
        details=details,
        **settings,
        seen={s.label: s.run.model.num_visible(np.array([num_context])).item() - 1 for s in subjects},
        shares=Table("", ("continuation", "share"), [(name, f"{share:.1%}") for name, share in means.items()]),
        documents=sorted({document for document, _ in places}),
        passages=list(zip(passages, texts, strict=True)),
    )


def shared_words(context: str, continuation: str) -> float:
    """The share of a continuation's distinct words (of five letters or more) that occur in the context; NaN of none."""
    words, known = (set(map(str.lower, TOPICAL.findall(text))) for text in (continuation, context))
    return len(words & known) / len(words) if words else float("nan")


def _writer(
    subject: Subject, context_tokens: int, num_tokens: int
) -> Callable[[Int[np.ndarray, " n"]], dict[str, str]]:
    """A function that continues contexts, of this length and therefore compiled once, by REMEMBERED and FORGOTTEN."""
    opened = subject.opened
    generator = Generator(
        opened.model,
        opened.params,
        segment_length=context_tokens,
        vocabulary=opened.vocabulary,
        sampling=SamplingConfig(temperature=0.0),
        stop_at_end=False,
    )

    def write(context: Int[np.ndarray, " n"]) -> dict[str, str]:
        remembered = generator.continuation(context, num_tokens)
        forgotten = remembered[:1] + generator.continuation(np.array(remembered[:1]), num_tokens - 1)
        return {REMEMBERED: opened.vocabulary.decode(remembered), FORGOTTEN: opened.vocabulary.decode(forgotten)}

    return write


def _check(subject: Subject, context_tokens: int) -> None:
    if overlap := subject.run.model.overlap:
        raise UserError(
            f"{subject.label}: windows that repeat {overlap} tokens see these in addition to what is remembered; "
            "--gin_param='PretrainedConfig.overlap = 0' reads separate windows"
        )
    window = subject.run.model.window_length
    if context_tokens % window:
        raise UserError(f"--context_tokens={context_tokens} must be a multiple of {subject.label}'s window, {window}")


def _places(lengths: Int[np.ndarray, " documents"], length: int, most: int) -> list[tuple[int, int]]:
    """(document, first token) of passages of `length` tokens: in each document up to `most`, evenly spread."""
    places = []
    for document, size in enumerate(lengths.tolist()):
        # The last token is the end of the document.
        last = size - 1 - length
        number = min(most, last // length + 1) if last >= 0 else 0
        places += [(document, last * (i + 1) // (number + 1)) for i in range(number)]
    if not places:
        raise UserError(
            f"no document has the {length:,} tokens of a context and its continuation: lower --context_tokens or "
            "--num_tokens"
        )
    return places
