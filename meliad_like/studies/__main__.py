"""Studies of trained models, each a page and its numbers in a folder.

python -m meliad_like.studies compare --checkpoint=DIR --other=DIR --output=DIR
python -m meliad_like.studies clear_state --checkpoint=DIR --output=DIR [--clear_every=4096]
python -m meliad_like.studies context_curve --checkpoint=DIR [--other=DIR ...] --output=DIR
python -m meliad_like.studies gates --checkpoint=DIR --output=DIR
python -m meliad_like.studies continuations --checkpoint=DIR [--other=DIR ...] --output=DIR
"""

import importlib
from pathlib import Path

from absl import flags

from meliad_like import command_line
from meliad_like.errors import UserError

STUDIES = ("compare", "clear_state", "context_curve", "gates", "continuations")

flags.DEFINE_string("checkpoint", None, "Checkpoint folder, or the --workdir of a training.", required=True)
flags.DEFINE_integer("step", None, "Which checkpoint. Default: the newest.")
flags.DEFINE_multi_string(
    "other", [], "Checkpoint to compare with; --gin_param then holds for it. Default: the same with those settings."
)
flags.DEFINE_integer("other_step", None, "Which checkpoint of the others. Default: the newest.")
flags.DEFINE_string("split", "test", "train, validation or test.")
flags.DEFINE_string("store", None, "Token store. Default: the one that the model was trained with.")
flags.DEFINE_string("output", None, "Folder for the page and the numbers, made if it doesn't exist.", required=True)
flags.DEFINE_multi_string("document", [], "Name of a document to read. Repeatable. Default: random ones.")
flags.DEFINE_integer(
    "num_documents",
    None,
    "Number of random documents, the same each time; 0: all. Default: 5; of context_curve all.",
    lower_bound=0,
)
flags.DEFINE_enum(
    "unit", "auto", ["auto", "word", "token"], "What losses are summed over. auto: words of bytes, otherwise tokens."
)
flags.DEFINE_integer("top", 40, "Number of words or tokens of each document with the largest gains.", lower_bound=1)
flags.DEFINE_integer("clear_every", None, "Tokens between two clearings. Default: a segment.", lower_bound=1)
flags.DEFINE_integer("context_tokens", None, "Length of a context, whole windows. Default: a window.", lower_bound=1)
flags.DEFINE_integer("num_contexts", 3, "Most contexts in each document.", lower_bound=1)
flags.DEFINE_integer("num_tokens", 100, "Number of tokens to write after each context.", lower_bound=2)

USED_BY = {
    **dict.fromkeys(("other", "other_step"), ("compare", "context_curve", "continuations")),
    **dict.fromkeys(("unit", "top"), ("compare", "clear_state")),
    "clear_every": ("clear_state",),
    **dict.fromkeys(("context_tokens", "num_contexts", "num_tokens"), ("continuations",)),
}
"""The flags that not all studies have."""


def main(study: str) -> None:
    if command_line.GIN_FILE.value:
        raise UserError("--gin_file has no effect here: the config comes from the checkpoint; --gin_param changes it")
    command_line.refuse_unused(study, USED_BY)
    # Importing jax takes seconds: a mistyped flag is reported before.
    from meliad_like.studies.readings import StudyRequest

    values = {name: flags.FLAGS[name].value for name in StudyRequest._fields}
    if values["num_documents"] is None and study != "context_curve":
        values["num_documents"] = 5
    output = Path(values["output"])
    output.mkdir(parents=True, exist_ok=True)
    request = StudyRequest(**values | {"output": output, "num_documents": values["num_documents"] or None})
    importlib.import_module(f"meliad_like.studies.{study}").run(request)
    print(f"wrote {output / 'index.html'}")


if __name__ == "__main__":
    command_line.run(main, subjects=STUDIES)
