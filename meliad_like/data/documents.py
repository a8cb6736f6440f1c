"""The kinds of document sources: their configs, and how they are opened."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from meliad_like.data.sources.base import Document, Reference, Source
from meliad_like.data.splits import SPLITS, SplitRule
from meliad_like.errors import UserError
from meliad_like.registry import Registry, fingerprint, to_plain
from meliad_like.validation import check_choices

__all__ = ["SOURCES", "SPLITS", "Document", "Reference", "Source", "SourceConfig", "open_source"]

Policy = Literal["stop", "skip"]
SOURCES = Registry("source")


@dataclass(frozen=True)
class SourceConfig:
    """The fields that all sources have: how documents are assigned to splits."""

    validation_documents: tuple[str, ...] = ()
    """Names of the documents for validation. If this or `test_documents` names any, all others are for training."""
    test_documents: tuple[str, ...] = ()
    """Names of the documents for the test split."""
    validation_share: float = 0.05
    """Share of the documents for validation, chosen by a hash of their names, unless lists or folders or files named
    `train`, `validation` or `test` assign them."""
    test_share: float = 0.05
    """Share of the documents for the test split, chosen in the same way."""
    empty: Policy = "stop"
    """What to do with a document without text: `stop` with an error that names it, or `skip` it with a warning."""

    folder: ClassVar[str] = ""
    undecodable: ClassVar[str] = "stop"

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
        """The rule that assigns documents to splits."""
        return SplitRule(
            frozenset(self.validation_documents),
            frozenset(self.test_documents),
            self.validation_share,
            self.test_share,
        )

    @property
    def settings_fingerprint(self) -> str:
        """SHA-256 of the settings that are not defaults, without the folder, which may differ between machines."""
        settings = to_plain(self, SOURCES, changed_only=True)
        return fingerprint({key: value for key, value in settings.items() if key != "folder"})

    def open(self) -> Source:
        """Opens the source, which may have no documents.

        Raises:
          UserError: the folder is missing.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class FolderSourceConfig(SourceConfig):
    """The fields of sources that read a folder."""

    folder: str = ""  # type: ignore[misc]  # the class variable is for sources without one
    """The folder to read."""
    undecodable: Policy = "stop"  # type: ignore[misc]
    """What to do with a document that is not UTF-8: `stop` or `skip`. In a repository only the file is left out."""


@SOURCES.register("text")
@dataclass(frozen=True)
class TextSource(FolderSourceConfig):
    """A folder of text files, one document per file."""

    suffixes: tuple[str, ...] = ()
    """Suffixes of the files to read; (): `.txt`."""
    exclude: tuple[str, ...] = ()
    """Patterns (`*.min.js`, `vendor`) of names of files and folders to leave out."""

    def open(self) -> Source:
        from meliad_like.data.sources import files

        return files.text_source(self.folder, self.suffixes, self.exclude, self.split_rule)


@SOURCES.register("jsonl")
@dataclass(frozen=True)
class JsonLinesSource(FolderSourceConfig):
    """Files with one JSON object per line (`.jsonl`, also `.gz` and `.zst`); the folder may also be one such file."""

    text_field: str = "text"
    """The field that holds a document's text."""
    name_field: str = ""
    """The field that holds a document's name; "": documents are numbered."""
    exclude: tuple[str, ...] = ()
    """Patterns of names of files and folders to leave out."""

    def open(self) -> Source:
        from meliad_like.data.sources.json_lines import json_lines_source

        return json_lines_source(self.folder, self.text_field, self.name_field, self.exclude, self.split_rule)


@SOURCES.register("repositories")
@dataclass(frozen=True)
class RepositoriesSource(FolderSourceConfig):
    """Source trees, one document per sub-folder, all its files concatenated, each under a line `# file: path`."""

    suffixes: tuple[str, ...] = ()
    """Suffixes of the files to read; (): those of common programming languages."""
    exclude: tuple[str, ...] = ()
    """Patterns (`*.min.js`, `vendor`) of names of files and folders to leave out."""

    def open(self) -> Source:
        from meliad_like.data.sources import files

        skip = self.undecodable == "skip"
        return files.repository_source(self.folder, self.suffixes, self.exclude, self.split_rule, skip)


@SOURCES.register("standard_library")
@dataclass(frozen=True)
class StandardLibrarySource(SourceConfig):
    """Python's own source, one document per package or module; files that are not UTF-8 are left out."""

    suffixes: tuple[str, ...] = ()
    """Suffixes of the files to read; (): `.py`."""
    exclude: tuple[str, ...] = ()
    """Patterns of names of files and folders to leave out."""

    def open(self) -> Source:
        from meliad_like.data.sources import files

        return files.standard_library_source(self.suffixes, self.exclude, self.split_rule)


@SOURCES.register("tfds")
@dataclass(frozen=True)
class TfdsSource(FolderSourceConfig):
    """A TensorFlow Datasets dataset in array_record files; the folder is the `data_dir`, or that of one version."""

    dataset: str = "pg19"
    """Name of the dataset, if `folder` holds several."""
    text_field: str = "text"
    """The field that holds a document's text (`book_text` in PG-19)."""
    name_field: str = ""
    """The field that holds a document's name; "": documents are numbered."""

    def open(self) -> Source:
        # tensorflow_datasets takes a second to import, and worker processes import this module.
        from meliad_like.data.sources.tfds import tfds_source

        return tfds_source(self.folder, self.dataset, self.text_field, self.name_field, self.split_rule)


def open_source(config: SourceConfig) -> Source:
    """Opens the source that the config describes.

    Raises:
      UserError: the folder is missing, or contains no document.
    """
    source = config.open()
    if source.num_documents == 0:
        place = config.folder or "no folder given"
        suffixes = getattr(config, "suffixes", None)
        wanted = "" if suffixes is None else f" or nothing in it matches suffixes = {suffixes}"
        raise UserError(f"the {SOURCES.name_of(config)} source has no documents: {place} is empty{wanted}")
    return source


def source_fingerprint(config: SourceConfig, source: Source) -> str:
    """SHA-256 of the settings and of every document's name and contents, so that it changes if a store would."""
    return fingerprint([config.settings_fingerprint, *source.contents()])
