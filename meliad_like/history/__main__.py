"""Ancient history: spans of a document's distant past in the window of a frozen model.

    meliad_like history score --checkpoint=DIR --store=DIR --split=train --output=DIR
    meliad_like history evaluate --checkpoint=DIR --store=DIR --selection=score_oracle --output=DIR
    meliad_like history select --checkpoint=DIR --store=DIR --split=train --selection=random --output=DIR
    meliad_like history train_selector --checkpoint=DIR --store=DIR --scores=DIR --output=DIR

HistoryConfig describes spans and windows: --gin_file=ancient_history/released_code.gin, or
--gin_param=HistoryConfig.stride=128. The same command resumes what was interrupted.
"""

from pathlib import Path

from meliad_like.command_line import Command
from meliad_like.errors import UserError

COMMANDS = ("score", "evaluate", "select", "train_selector")
SELECTIONS = ("random", "recent", "prefix_overlap", "overlap_oracle", "score_oracle")

SELECTING = ("evaluate", "select")
READING = ("score", *SELECTING)
USED_BY = {
    "scores": ("train_selector",),
    **dict.fromkeys(("selection", "selector"), SELECTING),
    **dict.fromkeys(("split", "document", "document_tokens", "max_tokens", "batch_size"), READING),
}
"""The commands that each flag is for; others are for all commands."""

COMMAND = Command(__doc__, subjects=COMMANDS, used_by=USED_BY)

for name in ("checkpoint", "step", "store", "max_tokens"):
    COMMAND.shared(name)
COMMAND.shared("split", "train, validation or test. Default: train for score, otherwise test.", default=None)
DOCUMENT = COMMAND.shared("document")
COMMAND.shared("document_tokens", lower_bound=2)
COMMAND.shared("batch_size", default=16)
OUTPUT = COMMAND.output("output", "Folder of the results; made if needed.", "folder", required=True)
SELECTION = COMMAND.multi_enum(
    "selection", [], SELECTIONS, "What ranks the spans. Repeatable; evaluate always adds random and overlap_oracle."
)
SELECTOR = COMMAND.multi_string(
    "selector", [], "Folder that train_selector made, in addition to or instead of --selection. Repeatable."
)
SCORES = COMMAND.string("scores", None, "Folder that score made.")


def main(command: str) -> int | None:
    selections = SELECTION.value, SELECTOR.value
    if command == "select" and (count := sum(map(len, selections))) != 1:
        raise UserError(f"select takes one --selection or one --selector, not {count}")
    if command == "train_selector" and not SCORES.value:
        raise UserError("train_selector needs scores to learn from: give the folder that score made, --scores=DIR")
    arguments = {**dict.fromkeys(SELECTING, selections), "train_selector": (SCORES.value,)}
    # Importing jax takes seconds: a mistyped flag is reported before.
    from meliad_like.config import read_changes
    from meliad_like.history import commands

    values = {name: COMMAND.flags[name].value for name in commands.HistoryRequest._fields if name in COMMAND.flags}
    values["changes"] = read_changes(COMMAND.gin_file.value, COMMAND.gin_param.value)
    values["split"] = values["split"] or ("train" if command == "score" else "test")
    request = commands.HistoryRequest(**values, documents=tuple(DOCUMENT.value))
    return getattr(commands, command)(request, Path(OUTPUT.value).expanduser(), *arguments.get(command, ()))


if __name__ == "__main__":
    COMMAND.run(main)
