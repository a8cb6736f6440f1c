"""Where documents come from: the config of a source, and the way from it to a source that can be read."""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Literal

from meliad_like.data.sources.base import Document, Reference, Source
from meliad_like.data.splits import SPLITS, SplitRule
from meliad_like.errors import UserError
from meliad_like.validation import check_choices

__all__ = ["SPLITS", "Document", "Reference", "Source", "SourceConfig", "open_source"]

Kind = Literal["text", "jsonl", "repositories", "standard_library", "tfds"]
Policy = Literal["stop", "skip"]


@dataclass(frozen=True)
class SourceConfig:
    """Where the documents come from, and how they are split."""

    kind: Kind = "standard_library"
    """`text`: a folder of text files, one document per file. `jsonl`: files with one JSON object per line (`.jsonl`,
    also `.gz` and `.zst`). `repositories`: source trees, one document per sub-folder, all its files concatenated, each
    under a line `# file: path`. `standard_library`: Python's own source, one document per package or module. `tfds`: a
    TensorFlow Datasets dataset that was prepared as array_record files."""
    folder: str = ""
    """The folder to read (`jsonl`: or one file); for `tfds`, the `data_dir` or a version's own folder. Not used by
    `standard_library`."""
    dataset: str = "pg19"
    """`tfds`: name of the dataset, where `folder` holds several."""
    text_field: str = "text"
    """`jsonl` and `tfds`: the field that holds a document's text (`book_text` in PG-19)."""
    name_field: str = ""
    """`jsonl` and `tfds`: the field that holds a document's name; "": documents are numbered."""
    suffixes: tuple[str, ...] = ()
    """`text` and trees: endings of the files to read; (): `.txt`, or those of common programming languages."""
    exclude: tuple[str, ...] = ()
    """`text`, `jsonl` and trees: patterns (`*.min.js`, `vendor`) of names of files and folders to leave out."""
    validation_documents: tuple[str, ...] = ()
    """Names of the documents for validation. Where this list or the next has any, all others are for training."""
    test_documents: tuple[str, ...] = ()
    """Names of the documents for test."""
    validation_share: float = 0.05
    """Share of the documents for validation, chosen by a hash of their names, where neither lists nor folders or files
    named `train`, `validation`, `test` decide."""
    test_share: float = 0.05
    """The same, for test."""
    empty: Policy = "stop"
    """A document without text: `stop` with an error that names it, or `skip` it with a warning."""
    undecodable: Policy = "stop"
    """A document that is not UTF-8: `stop` or `skip`. Of a repository only the file is left out; so it always is in
    the standard library."""

    def __post_init__(self) -> None:
        check_choices(self)
        shares = self.validation_share, self.test_share
        if min(shares) < 0 or sum(shares) >= 1:
            raise UserError(
                f"validation_share={shares[0]} and test_share={shares[1]} must not be negative and leave some for train"
            )
        if both := set(self.validation_documents) & set(self.test_documents):
            raise UserError(f"{min(both)} is both in validation_documents and in test_documents")

    @property
    def split_rule(self) -> SplitRule:
        """Which split a document belongs to."""
        return SplitRule(
            frozenset(self.validation_documents),
            frozenset(self.test_documents),
            self.validation_share,
            self.test_share,
        )

    @property
    def settings_fingerprint(self) -> str:
        """SHA-256 of the settings, the folder excepted: the same documents may lie elsewhere on another machine."""
        settings = {key: value for key, value in asdict(self).items() if key != "folder"}
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def open_source(config: SourceConfig) -> Source:
    """The source that the config describes.

    Raises:
      UserError: the folder is missing, or there is no document in it.
    """
    rule = config.split_rule
    # tensorflow_datasets takes a second to import, and worker processes import this module.
    if config.kind == "tfds":
        from meliad_like.data.sources.tfds import tfds_source

        source = tfds_source(config.folder, config.dataset, config.text_field, config.name_field, rule)
    elif config.kind == "jsonl":
        from meliad_like.data.sources.json_lines import json_lines_source

        source = json_lines_source(config.folder, config.text_field, config.name_field, config.exclude, rule)
    else:
        from meliad_like.data.sources import files

        if config.kind == "text":
            source = files.text_source(config.folder, config.suffixes, config.exclude, rule)
        elif config.kind == "repositories":
            skip = config.undecodable == "skip"
            source = files.repository_source(config.folder, config.suffixes, config.exclude, rule, skip)
        else:
            source = files.standard_library_source(config.suffixes, config.exclude, rule)
    if source.num_documents == 0:
        raise UserError(
            f"the {config.kind} source has no documents: {config.folder or 'no folder given'} is empty "
            f"or nothing in it matches SourceConfig.suffixes = {config.suffixes}"
        )
    return source


def source_fingerprint(config: SourceConfig, source: Source) -> str:
    """SHA-256 of the settings and of every document's name and contents: changes whenever a store would."""
    digest = hashlib.sha256(config.settings_fingerprint.encode())
    for name, contents in source.contents():
        digest.update(json.dumps([name, contents]).encode())
    return digest.hexdigest()
