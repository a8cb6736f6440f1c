"""The documents of an evaluation that are done, so that it goes on after a stop."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from meliad_like.errors import UserError
from meliad_like.history.evaluation import DocumentSums
from meliad_like.saved_json import parse_json

NAME = "documents.jsonl"


class Journal:
    """A file in the folder of an evaluation: first what it is made of, then a line for each document."""

    def __init__(self, folder: Path, made_of: dict[str, Any], *, replace: bool = False):
        """Opens the file, or begins it.

        Args:
            folder: of the evaluation; made if need be.
            made_of: all that decides the numbers, for JSON.
            replace: whether another evaluation in the folder gives way to this one.

        Raises:
            UserError: the folder has another evaluation that is not to be replaced, or a line is no JSON.
        """
        self._path = folder / NAME
        made_of = json.loads(json.dumps(made_of))
        text = self._path.read_text() if self._path.exists() else ""
        # A stop may have cut the last line: it is written again.
        lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
        rows = [parse_json(line, f"{self._path}:{number}") for number, line in enumerate(lines, 1)]
        saved = rows[0] if rows else {}
        changed = [name for name in made_of if saved.get(name) != made_of[name]]
        if lines and changed and not replace:
            raise UserError(
                f"{folder} has an evaluation of another {' and '.join(changed)}: choose another --output, or delete it"
            )
        if changed:
            lines, rows = [json.dumps(made_of) + "\n"], [made_of]
        if "".join(lines) != text:
            folder.mkdir(parents=True, exist_ok=True)
            self._path.write_text("".join(lines))
        self.done: dict[int, DocumentSums] = {}
        """By the document's index."""
        for row in rows[1:]:
            self.done[row["document"]] = DocumentSums.from_dict(row["sums"])

    def write(self, document: int, sums: DocumentSums) -> None:
        """Adds a document."""
        with self._path.open("a") as file:
            file.write(json.dumps({"document": document, "sums": dataclasses.asdict(sums)}) + "\n")
