"""Studies of trained models, each a page and its numbers in a folder.

python -m meliad_like.studies compare --checkpoint=DIR --other=DIR --output=DIR
python -m meliad_like.studies clear_state --checkpoint=DIR --output=DIR [--clear_every=4096]
python -m meliad_like.studies context_curve --checkpoint=DIR [--other=DIR ...] --output=DIR
python -m meliad_like.studies gates --checkpoint=DIR --output=DIR
python -m meliad_like.studies continuations --checkpoint=DIR [--other=DIR ...] --output=DIR
"""

from pathlib import Path

from absl import flags

from meliad_like import command_line
from meliad_like.errors import UserError

STUDIES = ("compare", "clear_state", "context_curve", "gates", "continuations")
COMPARISONS = ("compare", "clear_state")

CHECKPOINT = flags.DEFINE_string(
    "checkpoint", None, "Checkpoint folder, or the --workdir of a training.", required=True
)
STEP = flags.DEFINE_integer("step", None, "Which checkpoint. Default: the newest.")
OTHER = flags.DEFINE_multi_string(
    "other", [], "Checkpoint to compare with; --gin_param then holds for it. Default: the same with those settings."
)
OTHER_STEP = flags.DEFINE_integer("other_step", None, "Which checkpoint of the others. Default: the newest.")
SPLIT = flags.DEFINE_string("split", "test", "train, validation or test.")
STORE = flags.DEFINE_string("store", None, "Token store. Default: the one that the model was trained with.")
OUTPUT = flags.DEFINE_string("output", None, "Folder for the page and the numbers; made if need be.", required=True)
DOCUMENT = flags.DEFINE_multi_string("document", [], "Name of a document to read. Repeatable. Default: by chance.")
NUM_DOCUMENTS = flags.DEFINE_integer(
    "num_documents", None, "So many, the same each time; 0: all. Default: 5; of context_curve all.", lower_bound=0
)
UNIT = flags.DEFINE_enum(
    "unit", "auto", ["auto", "word", "token"], "What losses are summed over. auto: words of bytes, otherwise tokens."
)
TOP = flags.DEFINE_integer("top", 40, "Words or tokens of each document with the largest difference.", lower_bound=1)
CLEAR_EVERY = flags.DEFINE_integer(
    "clear_every", None, "Tokens between two clearings. Default: a segment.", lower_bound=1
)
CONTEXT_TOKENS = flags.DEFINE_integer(
    "context_tokens", None, "Tokens of a context, whole windows. Default: one window.", lower_bound=1
)
NUM_CONTEXTS = flags.DEFINE_integer("num_contexts", 3, "In each document, at most.", lower_bound=1)
NUM_TOKENS = flags.DEFINE_integer("num_tokens", 100, "Tokens to write after each context.", lower_bound=2)

USED_BY = {
    "other": ("compare", "context_curve", "continuations"),
    "other_step": ("compare", "context_curve", "continuations"),
    "unit": COMPARISONS,
    "top": COMPARISONS,
    "clear_every": ("clear_state",),
    "context_tokens": ("continuations",),
    "num_contexts": ("continuations",),
    "num_tokens": ("continuations",),
}


def main(study: str) -> None:
    if command_line.GIN_FILE.value:
        raise UserError("--gin_file has no effect here: the config comes from the checkpoint; --gin_param changes it")
    for name, studies in USED_BY.items():
        if flags.FLAGS[name].present and study not in studies:
            raise UserError(f"--{name} has no effect on {study}: it is for {' and '.join(studies)}")
    # Importing jax takes seconds: a mistyped flag is reported before.
    from meliad_like.studies import clear_state, compare, context_curve, continuations, gates
    from meliad_like.studies.readings import Request

    num_documents = NUM_DOCUMENTS.value
    if num_documents is None and study != "context_curve":
        num_documents = 5
    request = Request(
        checkpoint=CHECKPOINT.value,
        step=STEP.value,
        others=tuple(OTHER.value),
        other_step=OTHER_STEP.value,
        gin_params=tuple(command_line.GIN_PARAM.value),
        store=STORE.value,
        split=SPLIT.value,
        documents=tuple(DOCUMENT.value),
        num_documents=num_documents or None,
        unit=UNIT.value,
        top=TOP.value,
        clear_every=CLEAR_EVERY.value,
        context_tokens=CONTEXT_TOKENS.value,
        num_contexts=NUM_CONTEXTS.value,
        num_tokens=NUM_TOKENS.value,
        output=Path(OUTPUT.value),
    )
    modules = {
        "compare": compare,
        "clear_state": clear_state,
        "context_curve": context_curve,
        "gates": gates,
        "continuations": continuations,
    }
    modules[study].run(request)
    print(f"wrote {request.output / 'index.html'}")


if __name__ == "__main__":
    command_line.run(main, subjects=STUDIES)
