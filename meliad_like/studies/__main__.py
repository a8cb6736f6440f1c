"""Studies of trained models, each a page, its tables (CSV) and its charts (PNG) in a folder.

    meliad_like studies compare --checkpoint=DIR --other=DIR --output=DIR
    meliad_like studies memory_use --checkpoint=DIR --output=DIR [--every=4096]
    meliad_like studies context_curve --checkpoint=DIR [--other=DIR ...] --output=DIR
    meliad_like studies gates --checkpoint=DIR --output=DIR
    meliad_like studies memory_map --checkpoint=DIR --output=DIR
    meliad_like studies protocols --checkpoint=DIR --protocol=segments --protocol=token_by_token --output=DIR

The page is index.html in --output.
"""

import importlib
from pathlib import Path

from meliad_like.command_line import CONFIG_OF_CHECKPOINT, Command

STUDIES: dict[str, tuple[str, ...]] = {
    "compare": ("other", "other_step", "unit", "top"),
    "memory_use": ("kind", "part", "every"),
    "context_curve": ("other", "other_step"),
    "gates": (),
    "memory_map": (),
    "protocols": ("protocol", "stride", "windows", "concatenated"),
}
"""The studies, modules with a function `run`, and the flags of each that not all of them have."""

KINDS = ("shuffled", "earlier", "cleared", "frozen")
"""The interventions of memory_use, as in `meliad_like/studies/interventions.py`, whose import takes seconds."""

ALL_DOCUMENTS = ("context_curve", "memory_map", "memory_use", "protocols")
"""The studies that read all documents by default, because their figures are means over documents."""

COMMAND = Command(
    __doc__,
    subjects=tuple(STUDIES),
    used_by={
        flag: [name for name, own in STUDIES.items() if flag in own] for flags in STUDIES.values() for flag in flags
    },
    no_effect={"gin_file": CONFIG_OF_CHECKPOINT},
)

COMMAND.shared("checkpoint")
COMMAND.shared("step")
COMMAND.multi_string(
    "other", [], "Checkpoint to compare with; --gin_param then holds for it. Default: the same with those settings."
)
COMMAND.integer("other_step", None, "Which checkpoint of the others. Default: the newest.")
COMMAND.shared("split")
COMMAND.shared("store")
COMMAND.output("output", "Folder for the results; made if needed.", "folder", required=True)
COMMAND.shared("document", "Name of a document to read. Repeatable. Default: random ones.")
COMMAND.integer(
    "num_documents",
    None,
    f"Number of random documents, the same each time; 0: all. Default: 5; of {', '.join(ALL_DOCUMENTS)} all.",
    lower_bound=0,
)
COMMAND.enum(
    "unit", "auto", ["auto", "word", "token"], "What losses are summed over. auto: words of bytes, otherwise tokens."
)
COMMAND.integer("top", 40, "Number of words or tokens of each document with the largest gains.", lower_bound=1)
COMMAND.multi_enum("kind", [*KINDS], KINDS, "What the memory is exchanged for. Repeatable. Default: each of them.")
COMMAND.multi_string(
    "part", [], "What is exchanged: window, or a mixer by name. Repeatable. Default: all but the window."
)
COMMAND.integer(
    "every", None, "Tokens from one intervention to the next, whole windows. Default: a segment.", lower_bound=1
)
COMMAND.multi_enum(
    "protocol", ["segments"], ["segments", "sliding", "token_by_token"], "How the tokens are read. Repeatable."
)
COMMAND.integer("stride", None, "New tokens of a window of --protocol=sliding.", lower_bound=1)
COMMAND.integer("windows", 1, "Windows of --protocol=sliding that are read side by side.", lower_bound=1)
COMMAND.bool("concatenated", True, "Whether all documents are read as one, without resets.")


def main(study: str) -> None:
    # Importing jax takes seconds: a mistyped flag is reported before.
    from meliad_like.studies.page import write_study
    from meliad_like.studies.readings import StudyRequest

    values = {name: COMMAND.flags[name].value for name in StudyRequest._fields}
    if values["num_documents"] is None and study not in ALL_DOCUMENTS:
        values["num_documents"] = 5
    request = StudyRequest(**values | {"num_documents": values["num_documents"] or None})
    run = importlib.import_module(f"meliad_like.studies.{study}").run
    output = Path(COMMAND.flags["output"].value)
    write_study(run(request, **{name: COMMAND.flags[name].value for name in STUDIES[study]}), output)
    print(f"wrote {output / 'index.html'}")


if __name__ == "__main__":
    COMMAND.run(main)
