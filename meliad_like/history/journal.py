"""The documents of an evaluation that are done, so that it goes on after a stop."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from meliad_like.errors import UserError
from meliad_like.history.evaluation import DocumentSums

NAME = "documents.jsonl"


class Journal:
    """A file in the folder of an evaluation: first what it is made of, then a line for each document."""

    def __init__(self, folder: Path, made_of: dict[str, Any]):
        """Opens the file, or begins it.

        Args:
            folder: of the evaluation; made if need be.
            made_of: all that decides the numbers, for JSON.

        Raises:
            UserError: the folder has another evaluation.
        """
        self._path = folder / NAME
        self.done: dict[int, DocumentSums] = {}
        """By the document's index."""
        if not self._path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(made_of) + "\n")
            return
        first, *lines = self._path.read_text().splitlines(keepends=True)
        saved = json.loads(first)
        if changed := [name for name in made_of if saved.get(name) != json.loads(json.dumps(made_of[name]))]:
            raise UserError(
                f"{folder} has an evaluation of another {' and '.join(changed)}: choose another --output, or delete it"
            )
        # A stop may have cut the last line: it is written again.
        whole = [line for line in lines if line.endswith("\n")]
        if len(whole) < len(lines):
            self._path.write_text("".join([first, *whole]))
        for line in whole:
            row = json.loads(line)
            self.done[row["document"]] = DocumentSums.from_dict(row["sums"])

    def write(self, document: int, sums: DocumentSums) -> None:
        """Adds a document."""
        with self._path.open("a") as file:
            file.write(json.dumps({"document": document, "sums": dataclasses.asdict(sums)}) + "\n")
