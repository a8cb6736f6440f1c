"""The finished documents of an evaluation, so that it can be resumed."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from meliad_like.history.evaluation import DocumentSums
from meliad_like.saved_json import parse_json
from meliad_like.training.checkpoints import compare_metadata

NAME = "documents.jsonl"


class Journal:
    """A file in the folder of an evaluation: first what decides the numbers, then a line for each document."""

    def __init__(self, folder: Path, identity: dict[str, Any], *, replace: bool = False):
        """Opens the file, or creates it.

        Args:
            folder: folder of the evaluation; made if needed.
            identity: all that decides the numbers, for JSON.
            replace: whether another evaluation in the folder is replaced by this one.

        Raises:
            UserError: the folder has another evaluation that is not to be replaced, or a line is no JSON.
        """
        self._path = folder / NAME
        identity = json.loads(json.dumps(identity))
        text = self._path.read_text() if self._path.exists() else ""
        # An interruption may have cut the last line: it is written again.
        lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
        rows = [parse_json(line, f"{self._path}:{number}") for number, line in enumerate(lines, 1)]
        if rows and not replace:
            compare_metadata(folder, rows[0], identity)
        if not rows or rows[0] != identity:
            lines, rows = [json.dumps(identity) + "\n"], [identity]
        folder.mkdir(parents=True, exist_ok=True)
        self._path.write_text("".join(lines))
        self.done = {row["document"]: DocumentSums.from_dict(row["sums"]) for row in rows[1:]}
        """Sums of the finished documents, by index."""

    def write(self, document: int, sums: DocumentSums) -> None:
        """Adds a document."""
        with self._path.open("a") as file:
            file.write(json.dumps({"document": document, "sums": dataclasses.asdict(sums)}) + "\n")
