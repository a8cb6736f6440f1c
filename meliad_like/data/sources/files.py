"""Documents made of files: folders of text files, and source trees with one document per repository."""

import fnmatch
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meliad_like.data.sources.base import Document, NotUTF8Error, checked, decode
from meliad_like.data.splits import SPLITS, SplitRule
from meliad_like.errors import UserError

SOURCE_SUFFIXES = (
    ".py", ".c", ".cc", ".cpp", ".h", ".hpp", ".java", ".js", ".ts", ".go", ".rs", ".rb", ".scala", ".kt", ".swift",
)  # fmt: skip

# Not part of every installation (site-packages, tests), or generated tables.
STANDARD_LIBRARY_EXCLUDE = (
    "site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "_sysconfigdata*",
)  # fmt: skip
# Packages that every installation of Python 3.11 or newer has, with documents of more than 150,000 characters.
STANDARD_LIBRARY_VALIDATION = ("http", "json")
STANDARD_LIBRARY_TEST = ("logging", "urllib")


@dataclass(frozen=True)
class FilesReference:
    """A document of one or several files, one after the other."""

    name: str
    split: str
    root: Path
    files: tuple[str, ...]
    """Paths below `root`, with `/`."""
    headers: bool
    """Whether each file is announced by a line `# file: path`; files without text are then left out."""
    skip_undecodable: bool
    """Whether a file of several that is not UTF-8 is left out instead of being an error."""

    def read(self) -> Document:
        parts, skipped = [], []
        for file in self.files:
            try:
                text = decode((self.root / file).read_bytes(), str(self.root / file))
            except NotUTF8Error as error:
                if self.headers and self.skip_undecodable:
                    skipped.append(str(error))
                    continue
                raise
            if not self.headers:
                parts.append(text)
            elif text.strip():
                parts.append(f"# file: {file}\n{text}" + ("" if text.endswith("\n") else "\n"))
        return checked(Document(self.name, self.split, "".join(parts), tuple(skipped)))


@dataclass(frozen=True)
class FilesSource:
    """References that are known from the start, because listing folders is cheap."""

    listed: tuple[FilesReference, ...] = field(repr=False)

    @property
    def num_documents(self) -> int:
        return len(self.listed)

    def references(self) -> Iterator[FilesReference]:
        yield from self.listed

    def contents(self) -> Iterator[tuple[str, str]]:
        for reference in self.listed:
            for file in reference.files:
                with (reference.root / file).open("rb") as opened:
                    digest = hashlib.file_digest(opened, "sha256").hexdigest()
                yield f"{reference.split}/{reference.name}/{file}", digest


def text_source(folder: str, suffixes: Sequence[str], exclude: Sequence[str], rule: SplitRule) -> FilesSource:
    """One document per file; its name is its path without the suffix, below the folder (or the split's folder)."""
    root = existing_folder(folder)
    all_files = list_files(root, suffixes or (".txt",), exclude)
    references = []
    for split, base, files in split_folders(root, all_files, rule):
        for file in files:
            name = os.path.splitext(file)[0]
            references.append(FilesReference(name, rule(name, split), base, (file,), False, False))
    return FilesSource(tuple(references))


def repository_source(
    folder: str, suffixes: Sequence[str], exclude: Sequence[str], rule: SplitRule, skip_undecodable: bool
) -> FilesSource:
    """One document per sub-folder of the folder (or of the split's folder): all its files, ordered by path."""
    root = existing_folder(folder)
    files = list_files(root, suffixes or SOURCE_SUFFIXES, exclude)
    return _grouped(root, files, rule, skip_undecodable, single_files=False)


def standard_library_source(suffixes: Sequence[str], exclude: Sequence[str], rule: SplitRule) -> FilesSource:
    """The source of Python's own standard library: one document per package, and per module outside packages.

    Without lists of names in the config, `STANDARD_LIBRARY_VALIDATION` and `STANDARD_LIBRARY_TEST` are held out.
    """
    root = existing_folder(sysconfig.get_paths()["stdlib"])
    if not rule.listed:
        rule = SplitRule(frozenset(STANDARD_LIBRARY_VALIDATION), frozenset(STANDARD_LIBRARY_TEST), 0.0, 0.0)
    files = list_files(root, suffixes or (".py",), (*STANDARD_LIBRARY_EXCLUDE, *exclude))
    return _grouped(root, files, rule, skip_undecodable=True, single_files=True)


def _grouped(
    root: Path, all_files: Sequence[str], rule: SplitRule, skip_undecodable: bool, single_files: bool
) -> FilesSource:
    references = []
    for split, base, files in split_folders(root, all_files, rule):
        groups: dict[str, list[str]] = {}
        for file in files:
            first, slash, _ = file.partition("/")
            if slash or single_files:
                groups.setdefault(first if slash else os.path.splitext(first)[0], []).append(file)
        for name, members in sorted(groups.items()):
            references.append(FilesReference(name, rule(name, split), base, tuple(members), True, skip_undecodable))
    return FilesSource(tuple(references))


def existing_folder(folder: str) -> Path:
    """The folder's absolute path.

    Raises:
      UserError: there is no such folder.
    """
    path = Path(folder).expanduser().absolute()
    if not folder or not path.is_dir():
        raise UserError(f"there is no folder of documents at FolderSourceConfig.folder = {folder!r}")
    return path


def list_files(root: Path, suffixes: Sequence[str], exclude: Sequence[str]) -> list[str]:
    """Sorted paths (with `/`) below `root` of the files with one of the suffixes.

    Hidden files and folders are left out, and those whose own name matches one of the patterns in `exclude`.
    """

    def wanted(name: str) -> bool:
        return not name.startswith(".") and not any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude)

    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if wanted(name)]
        below = Path(folder).relative_to(root)
        found += [(below / name).as_posix() for name in files if name.endswith(tuple(suffixes)) and wanted(name)]
    return sorted(found)


def split_folders(root: Path, files: Sequence[str], rule: SplitRule) -> list[tuple[str | None, Path, list[str]]]:
    """Triples (split, folder, files below it): for each folder named after a split, or one (None, root, files).

    Raises:
      UserError: some files lie in folders named after splits, and others do not.
    """
    if rule.listed or not any((root / split).is_dir() for split in SPLITS):
        return [(None, root, list(files))]
    found: dict[str, list[str]] = {split: [] for split in SPLITS}
    for file in files:
        first, _, rest = file.partition("/")
        if first not in found or not rest:
            raise UserError(
                f"{root} has folders named after splits ({', '.join(SPLITS)}), but {file} is in none of them: move it, "
                "leave it out with TextSource.exclude, or name documents in SourceConfig.test_documents instead"
            )
        found[first].append(rest)
    return [(split, root / split, found[split]) for split in SPLITS]
