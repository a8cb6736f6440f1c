"""Two models on the same documents: section 4.6 and appendix G of Block-Recurrent Transformers."""

from meliad_like.data.vocabulary import BytesVocabularyConfig
from meliad_like.errors import UserError
from meliad_like.studies.comparison_page import Settings, compare_page
from meliad_like.studies.readings import Reading, StudyRequest, choose, open_subject, read, with_distinct_labels


def run(request: StudyRequest) -> None:
    """Writes the study into the folder `request.output`.

    Raises:
      UserError: there is nothing to compare with, or a checkpoint, store, split or document is missing.
    """
    if len(request.others) > 1 or not (request.others or request.gin_params):
        raise UserError("compare needs one other model: --other=DIR, or --gin_param=... for the same one's settings")
    first = open_subject(request.checkpoint, step=request.step)
    folder = request.others[0] if request.others else request.checkpoint
    step = request.other_step if request.others else request.step
    other = open_subject(folder, request.gin_params, step)
    first, other = with_distinct_labels([first, other])
    chosen = choose([first, other], request)
    pair = read(first, chosen), read(other, chosen)
    compare_page(
        request.output,
        f"{first.label} against {other.label}",
        *pair,
        chosen,
        settings(request, pair[0], window=other.run.model.window_length),
    )


def settings(request: StudyRequest, first: Reading, window: int) -> Settings:
    """The settings of the comparison; `window` is the other model's."""
    unit = request.unit
    if unit == "auto":
        unit = "word" if isinstance(first.subject.run.vocabulary, BytesVocabularyConfig) else "token"
    return Settings(unit, request.top, window, first.subject.run.data.segment_length)
