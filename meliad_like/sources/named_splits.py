"""Splits that folders and files are named after, in the layouts in which collections are published.

A word for a split counts in every folder and file below the source's folder: `wiki/test/0.txt`, `test/wiki/0.txt`,
`data/train-00000-of-00001.parquet`, `split=dev/0.parquet`, `wiki.valid.tokens`. It is a whole word, in any case,
between characters that are not letters, perhaps with an ending (`testset`, `trainData`): `latest` and `contest` are no
tests. Spaces do not separate words in the name of a text file, which is often a title.

Folders decide. Words inside the name of a file count only where no folder is named after a split: `squad_test.jsonl`
is for the test, `validation/example_holdout_0.jsonl` for validation. Where such a word is the whole name of the file,
it must agree with the folders: `train/test.jsonl` is an error. A folder for evaluation, or of what is held out, may
hold both splits: `evaluation/test.jsonl` is for the test.

All files are named after splits, or none is: otherwise a file that is held out under another name (`blind.txt`) would
be dealt to any split. Where the only split that is named is `train`, all documents are for training if every path
begins with it; otherwise (`data/train-00000-of-00001.parquet`) shares are held out. Errors advise to ignore the names
only where none of them means a split (`libxml_valid.txt`): documents that are held out would be dealt into training.
"""

import re
from collections.abc import Callable, Iterable, Mapping

from meliad_like.errors import UserError
from meliad_like.remote import AnyPath
from meliad_like.sources.base import SourceConfig

WORDS = dict.fromkeys(("train", "training", "trn"), "train")
WORDS |= dict.fromkeys(("validation", "valid", "val", "dev", "development", "eval", "evaluation"), "validation")
WORDS |= dict.fromkeys(("test", "testing", "tst", "heldout", "holdout"), "test")
VAGUE = ("eval", "evaluation", "heldout", "holdout")
"""Words that may stand for both splits that are held out; another word decides which, if there is one."""


def splits_of_path(file: str, separators: str = r"[\W\d_]+") -> set[str]:
    """The split that a file is for by the names of its folders and its own; empty if they name none, several if they
    contradict each other. `separators` is the pattern of what separates words in the name of the file."""
    folder, _, name = file.rpartition("/")
    in_folders, in_name = _stems(folder) & WORDS.keys(), _stems(name, separators) & WORDS.keys()
    if not in_folders:
        return _splits_in(in_name)
    # Nothing but words for splits, and what may stand beside them.
    is_whole_name = _stems(name.partition(".")[0], separators) <= {*WORDS, "", "of", "split"}
    says_which = in_folders <= {*VAGUE} and not _splits_in(in_name - {*VAGUE}) <= {"train"}
    return _splits_in(in_folders | in_name if is_whole_name or says_which else in_folders)


def splits_of_repository(file: str) -> set[str]:
    """The split that the first folder of a path is named after: names inside of a repository don't count."""
    first, slash, _ = file.partition("/")
    return _splits_in(_stems(first, "/") & WORDS.keys()) if slash else set()


def _stems(name: str, separators: str = r"[\W\d_]+") -> set[str]:
    return {re.sub("(set|data)$", "", word.strip().lower()) for word in re.split(separators, name)}


def _splits_in(words: set[str]) -> set[str]:
    certain = {WORDS[word] for word in words if word not in VAGUE}
    return certain if certain - {"train"} else {WORDS[word] for word in words}


def named_splits(
    config: SourceConfig, root: AnyPath, files: Iterable[str], splits_of: Callable[[str], set[str]]
) -> dict[str, str]:
    """The split that each file is named after; empty if names don't assign documents. Raises a UserError if only some
    files are named after splits, or one is named after two."""
    if config.listed or not config.splits_by_name:
        return {}
    named = {file: splits_of(file) for file in files}
    if not any(named.values()):
        return {}
    way_out = f"move or rename it, leave it out with {type(config).__name__}.exclude, or, if no name means a split,"
    way_out += " set FolderSourceConfig.splits_by_name = False"
    for file, splits in named.items():
        if len(splits) > 1:
            raise UserError(f"{root / file} is named after several splits ({', '.join(sorted(splits))}): {way_out}")
    if unnamed := [file for file, splits in named.items() if not splits]:
        example = next(file for file, splits in named.items() if splits)
        raise UserError(f"{root} has paths named after splits, such as {example}, but {unnamed[0]} is not: {way_out}")
    return {file: split for file, (split,) in named.items()}


def names_assign(splits: Mapping[str, str]) -> bool:
    """Whether the names of these files assign documents; otherwise shares do."""
    below_train = bool(splits) and all(re.match(r"train\b", file) for file in splits)
    return below_train or not set(splits.values()) <= {"train"}
