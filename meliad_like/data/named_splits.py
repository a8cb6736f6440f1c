"""Splits that folders and files are named after, in the layouts in which collections are published.

A word for a split counts in every folder and file below the source's folder: `wiki/test/0.txt`, `test/wiki/0.txt`,
`data/train-00000-of-00001.parquet`, `split=dev/0.parquet`, `wiki.valid.tokens`. It is a whole word, in any case,
between characters that are not letters, perhaps with an ending (`testset`, `trainData`): `latest` and `contest` are no
tests. Spaces do not separate words in the name of a text file, which is often a title.

All files are named after splits, or none is: otherwise a file that is held out under another name (`blind.txt`) would
be dealt to any split. Where the only split that is named is `train`, all documents are for training if every path
begins with it; otherwise (`data/train-00000-of-00001.parquet`) shares are held out.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from meliad_like.data.documents import SourceConfig
from meliad_like.errors import UserError

WORDS = dict.fromkeys(("train", "training"), "train")
WORDS |= dict.fromkeys(("validation", "valid", "val", "dev", "development", "eval", "evaluation"), "validation")
WORDS |= dict.fromkeys(("test", "testing", "heldout", "holdout"), "test")


def splits_of_path(file: str) -> set[str]:
    """The splits that the folders of a path and its file are named after."""
    return _splits_in(re.split(r"[\W\d_]+", file))


def splits_of_text(file: str) -> set[str]:
    """The same for a text file, whose name may be a title."""
    folder, _, name = file.rpartition("/")
    return splits_of_path(folder) | _splits_in(re.split(r"[-._=\d]+", name))


def splits_of_repository(file: str) -> set[str]:
    """The split that the first folder of a path is named after: what is inside of a repository is its own."""
    first, slash, _ = file.partition("/")
    return _splits_in([first] if slash else [])


def _splits_in(words: Iterable[str]) -> set[str]:
    stems = (re.sub("(set|data)$", "", word.strip().lower()) for word in words)
    return {WORDS[stem] for stem in stems if stem in WORDS}


def named_splits(
    config: SourceConfig, root: Path, files: Sequence[str], splits_of: Callable[[str], set[str]]
) -> dict[str, str]:
    """The split that each file is named after; empty if names don't assign documents.

    Raises:
      UserError: only some files are named after splits, or one is named after two.
    """
    if config.listed or not config.splits_by_name:
        return {}
    named = {file: splits_of(file) for file in files}
    if not any(named.values()):
        return {}
    way_out = "or bind FolderSourceConfig.splits_by_name = False if these names are not of splits"
    for file, splits in named.items():
        if len(splits) > 1:
            raise UserError(
                f"{root / file} is named after several splits ({', '.join(sorted(splits))}): rename it, read a folder "
                f"further down (FolderSourceConfig.folder = {str((root / file).parent)!r}), {way_out}"
            )
    unnamed = [file for file, splits in named.items() if not splits]
    if unnamed:
        example = next(file for file, splits in named.items() if splits)
        raise UserError(
            f"{root} has files or folders named after splits (such as {example}), but {unnamed[0]} is not: move or "
            f"rename it, leave it out with {type(config).__name__}.exclude, name documents in "
            f"SourceConfig.test_documents instead, {way_out}"
        )
    return {file: split for file, (split,) in named.items()}


def names_assign(splits: Mapping[str, str]) -> bool:
    """Whether the names of these files assign documents; otherwise shares do."""
    return not set(splits.values()) <= {"train"} or (
        bool(splits) and all(re.match(r"train\b", file) for file in splits)
    )
