"""Documents made of files: folders of text files, and source trees with one document per repository."""

import collections
import fnmatch
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, NoReturn

from meliad_like.errors import UserError, one_line, refusals
from meliad_like.remote import AnyPath, Version, is_remote, read_whole, version, versions_below
from meliad_like.sources.base import (
    READERS_AT_ONCE,
    SOURCES,
    SPLITS,
    BadDocumentError,
    Document,
    FolderSourceConfig,
    NotUTF8Error,
    Source,
    SourceConfig,
    SourceFile,
    decode,
    raise_if_remote,
)
from meliad_like.sources.named_splits import named_splits, names_assign, splits_of_path, splits_of_repository

SOURCE_SUFFIXES = (
    ".py", ".c", ".cc", ".cpp", ".h", ".hpp", ".java", ".js", ".ts", ".go", ".rs", ".rb", ".scala", ".kt", ".swift",
)  # fmt: skip

# Folders that not every installation has (site-packages, tests), and generated tables.
STANDARD_LIBRARY_EXCLUDE = (
    "site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "_sysconfigdata*",
)  # fmt: skip
# Packages that every installation of Python 3.11 or newer has, with documents of more than 150,000 characters.
STANDARD_LIBRARY_VALIDATION = ("http", "json")
STANDARD_LIBRARY_TEST = ("logging", "urllib")


@dataclass(frozen=True)
class FilesSourceConfig(SourceConfig):
    """The fields of sources whose documents are made of files."""

    suffixes: tuple[str, ...] = ()
    """Suffixes of the files to read; (): the usual suffixes of the kind of source."""
    exclude: tuple[str, ...] = ()
    """Patterns (`*.min.js`, `vendor`) of names of files and folders to leave out."""


@SOURCES.register("text")
class TextSource(FolderSourceConfig, FilesSourceConfig):
    """A folder of text files (`.txt`), one document per file; its name is its path without the suffix, below the folder
    (or, where all are in folders `train`, `validation` and `test` of it, below these)."""

    def open(self) -> Source:
        splits_of = partial(splits_of_path, separators=r"[-._=\d]+")
        return _open(self, self.existing_folder(), (".txt",), _each_file, splits_of=splits_of, headers=False)


@SOURCES.register("repositories")
class RepositoriesSource(FolderSourceConfig, FilesSourceConfig):
    """Source trees, one document per sub-folder, all its files by path, each under a line `# file: path`."""

    def open(self) -> Source:
        return _open(self, self.existing_folder(), SOURCE_SUFFIXES, _by_folder)


@SOURCES.register("standard_library")
class StandardLibrarySource(FilesSourceConfig):
    """Python's own source (`.py`), one document per package or module; files that are not UTF-8 are left out.

    Without lists of names, `STANDARD_LIBRARY_VALIDATION` and `STANDARD_LIBRARY_TEST` are held out.
    """

    undecodable: ClassVar[str] = "skip"

    def open(self) -> Source:
        root, config = Path(sysconfig.get_paths()["stdlib"]).absolute(), self
        if not self.listed:
            validation, test = STANDARD_LIBRARY_VALIDATION, STANDARD_LIBRARY_TEST
            config = replace(self, validation_documents=validation, test_documents=test)
        group = partial(_by_folder, single_files=True)
        opened = _open(config, root, (".py",), group, exclude=STANDARD_LIBRARY_EXCLUDE)
        return replace(opened, passed_over="")


Groups = Iterable[tuple[str, list[str]]]
"""Pairs (name of a document, its files)."""


def _each_file(files: Sequence[str]) -> Groups:
    names = [os.path.splitext(file)[0] for file in files]
    numbers = collections.Counter(names)
    # a.txt and a.md keep their suffixes.
    return [(name if numbers[name] == 1 else file, [file]) for name, file in zip(names, files, strict=True)]


def _by_folder(files: Sequence[str], single_files: bool = False) -> Groups:
    """Groups files by their first folder; with `single_files`, a file outside of folders is a document too."""
    groups: dict[str, list[str]] = {}
    for file in files:
        first, slash, _ = file.partition("/")
        if slash or single_files:
            groups.setdefault(first if slash else os.path.splitext(first)[0], []).append(file)
    return sorted(groups.items())


def _open(
    config: FilesSourceConfig,
    root: AnyPath,
    suffixes: Sequence[str],
    group: Callable[[Sequence[str]], Groups],
    *,
    splits_of: Callable[[str], set[str]] = splits_of_repository,
    exclude: Sequence[str] = (),
    headers: bool = True,
) -> Source:
    files, passed_over = list_files(root, config.suffixes or suffixes, (*exclude, *config.exclude))
    splits = named_splits(config, root, files, splits_of)
    by_share = not names_assign(splits)
    # Where all files are in folders of splits, names begin below these; in "val/a" and "dev/a" they have to be kept.
    firsts = {file.partition("/")[0] for file in splits}
    in_folders = bool(splits) and (splits_of is splits_of_repository or firsts <= set(SPLITS))
    shards, contents = [], []
    for folder in sorted(firsts, key=[*SPLITS, *sorted(firsts)].index) if in_folders else [""]:
        base = root / folder
        below = [file.removeprefix(f"{folder}/") for file in files if file.startswith(f"{folder}/" if folder else "")]
        for name, members in group(below):
            if folder and folder not in SPLITS:
                name = f"{folder}/{name}"
            whole_paths = [f"{folder}/{file}".lstrip("/") for file in members]
            split = config.split_of(name, None if by_share else splits[whole_paths[0]])
            reading = (tuple(members), headers, config.undecodable == "skip", config.encoding)
            for file, path in zip(members, whole_paths, strict=True):
                full_name, place = f"{split}/{name}/{file}", os.path.join(root, path)
                contents.append(SourceFile(full_name, place, files[path], len(shards)))
            shards.append((partial(read_files, name, split, base, *reading),).__iter__)
    by_share = by_share and not config.listed
    at_once = READERS_AT_ONCE if is_remote(root) else 1
    return Source(tuple(shards), len(shards), tuple(contents), by_share, passed_over, documents_at_once=at_once)


def read_files(
    name: str, split: str, root: AnyPath, files: Sequence[str], headers: bool, skip_undecodable: bool, encoding: str
) -> Document:
    """A document of one or several files, one after the other.

    Args:
      files: paths below `root`, with `/`.
      headers: whether each file is announced by a line `# file: path`; files without text are then left out.
      skip_undecodable: whether a file of several that is not UTF-8 is left out instead of being an error.
    """
    parts, skipped, contents = [], [], []
    for file in files:
        try:
            raw = read_whole(root / file)
            contents.append((f"{split}/{name}/{file}", hashlib.sha256(raw).hexdigest()))
            text = decode(raw, str(root / file), encoding)
            del raw  # Not two copies of a large file at once.
        except refusals() as error:
            raise_if_remote(root / file, error)
            problem = f"{root / file} can't be read: {getattr(error, 'strerror', error) or error}"
            raise BadDocumentError(f"{problem}; remove it, or leave it out with exclude") from None
        except NotUTF8Error as error:
            if headers and skip_undecodable:
                skipped.append(str(error))
                continue
            raise
        if not headers:
            parts.append(text)
        elif text.strip():
            parts.append(f"# file: {file}\n{text}" + ("" if text.endswith("\n") else "\n"))
    return Document(name, split, "".join(parts), tuple(skipped), contents=tuple(contents))


def list_files(root: AnyPath, suffixes: Sequence[str], exclude: Sequence[str]) -> tuple[dict[str, Version], str]:
    """The files below `root` with one of the suffixes, by their sorted paths below it; and which others were not read.

    Hidden files and folders are left out, and those whose own name matches one of the patterns in `exclude`. Links are
    followed, except to what is below `root` anyway, whose documents would be there twice, perhaps in two splits. Raises
    a UserError if a folder can't be read, or a file is a link to nothing.
    """

    def is_included(name: str) -> bool:
        return not name.startswith(".") and not any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude)

    if isinstance(root, Path):
        found = dict.fromkeys(_walk(root, is_included))
    else:
        try:
            found = versions_below(root)
        except refusals() as error:
            raise UserError(f"{root} can't be listed: {one_line(error)}") from None
        found = {path: found[path] for path in found if all(map(is_included, path.split("/")))}
    files, passed_over = {}, collections.Counter()
    for path in sorted(found):
        place = os.path.join(root, path)
        if isinstance(root, Path) and _is_inner_link(root, place):
            passed_over["a link to others"] += 1
        elif path.endswith(tuple(suffixes)):
            try:
                files[path] = found[path] or version(place)
            except FileNotFoundError:
                raise UserError(f"{place} is a link to nothing: remove it, or leave it out with exclude") from None
        else:
            passed_over[os.path.splitext(path)[1] or "no suffix"] += 1
    most = ", ".join(f"{number} with {suffix}" for suffix, number in passed_over.most_common(3))
    return files, most and (
        f"{passed_over.total()} files were passed over ({most}{', ...' if len(passed_over) > 3 else ''}): "
        f"suffixes = ({', '.join(map(repr, suffixes))},) are read"
    )


def _walk(root: Path, is_included: Callable[[str], bool]) -> Iterator[str]:
    """The paths of the included files below a folder on a disk, and of links to folders that are not followed."""

    def refuse(error: OSError) -> NoReturn:
        raise UserError(f"{error.filename} can't be read: {error.strerror}; leave it out with exclude")

    begin = len(os.path.join(root, ""))
    for folder, folders, files in os.walk(root, onerror=refuse, followlinks=True):
        repeated = {name for name in folders if _is_inner_link(root, os.path.join(folder, name))}
        folders[:] = [name for name in folders if is_included(name) and name not in repeated]
        yield from (os.path.join(folder, name)[begin:] for name in (*files, *repeated) if is_included(name))


def _is_inner_link(root: Path, path: str) -> bool:
    """Whether a path is a link to something that is below `root` anyway, or to a folder that `root` is in."""
    if not os.path.islink(path) or not os.path.exists(path):
        return False
    target, real_root = Path(path).resolve(), root.resolve()
    return target.is_relative_to(real_root) or real_root.is_relative_to(target)
