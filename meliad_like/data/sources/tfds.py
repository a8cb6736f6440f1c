"""Documents in a TensorFlow Datasets dataset, prepared as array_record files and read without TensorFlow."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from meliad_like.data.sources.base import Document, checked, decode
from meliad_like.data.sources.files import existing_folder
from meliad_like.data.splits import SPLITS, SplitRule
from meliad_like.errors import UserError

INFO_NAME = "dataset_info.json"


@dataclass(frozen=True)
class ExampleReference:
    """One example of a dataset."""

    folder: str
    dataset_split: str
    index: int
    found_in: str | None
    """The split that the dataset itself puts it in."""
    text_field: str
    name_field: str
    rule: SplitRule

    def read(self) -> Document:
        example = _data_source(self.folder, self.dataset_split)[self.index]
        place = f"{self.dataset_split}/{self.index}"
        name = self._text(example, self.name_field, place) if self.name_field else place
        return checked(Document(name, self.rule(name, self.found_in), self._text(example, self.text_field, place)))

    def _text(self, example: dict[str, Any], field: str, place: str) -> str:
        if field not in example:
            raise UserError(f"example {place} has no field {field!r}; it has {', '.join(map(repr, example))}")
        value = example[field]
        return decode(value, f"field {field!r} of example {place}") if isinstance(value, bytes) else str(value)


@dataclass(frozen=True)
class DatasetSource:
    """All examples of a dataset's splits, in order."""

    folder: str
    name: str
    sizes: dict[str, int]
    """The number of examples of each split."""
    text_field: str
    name_field: str
    rule: SplitRule

    @property
    def num_documents(self) -> int:
        return sum(self.sizes.values())

    def references(self) -> Iterator[ExampleReference]:
        held_out = any(split in self.sizes for split in ("validation", "test"))
        for split, size in self.sizes.items():
            for index in range(size):
                found_in = split if held_out else None
                yield ExampleReference(self.folder, split, index, found_in, self.text_field, self.name_field, self.rule)

    def contents(self) -> Iterator[tuple[str, str]]:
        # It names the version, the splits, and every file's number of examples; a version's files never change.
        yield self.name, (Path(self.folder) / INFO_NAME).read_text()


def tfds_source(folder: str, dataset: str, text_field: str, name_field: str, rule: SplitRule) -> DatasetSource:
    """The dataset in `folder`, which is a version's own folder, or a `data_dir` that holds one version of `dataset`.

    Raises:
      UserError: there is no dataset, or there are several, or its format needs TensorFlow.
    """
    root = existing_folder(folder)
    if not (root / INFO_NAME).exists():
        found = sorted(path.parent for path in (root / dataset).rglob(INFO_NAME))
        if not found:
            raise UserError(
                f"{root} has no dataset {dataset!r} (no {INFO_NAME} in it or in {dataset}/); write it with: "
                f"tfds build {dataset} --file_format=array_record --data_dir={root}"
            )
        if len(found) > 1:
            names = ", ".join(path.relative_to(root).as_posix() for path in found)
            raise UserError(
                f"{root} has several versions of {dataset!r} ({names}): set FolderSourceConfig.folder to one"
            )
        root = found[0]
    info = tfds.builder_from_directory(root).info
    if info.file_format != tfds.core.FileFormat.ARRAY_RECORD:
        written_as = "an unknown" if info.file_format is None else info.file_format.value
        raise UserError(
            f"{root} is in {written_as} format, which needs TensorFlow to be read: write it again with "
            f"tfds build {info.name} --file_format=array_record"
        )
    unknown = [split for split in info.splits if split not in SPLITS]
    if unknown:
        raise UserError(f"{root} has a split {unknown[0]!r}; the splits that can be read are {', '.join(SPLITS)}")
    sizes = {split: info.splits[split].num_examples for split in SPLITS if split in info.splits}
    return DatasetSource(str(root), info.full_name, sizes, text_field, name_field, rule)


@functools.cache
def _data_source(folder: str, split: str) -> Any:
    """The opened split, once in each process."""
    # Its decorator hides the parameters from type checkers.
    return tfds.builder_from_directory(folder).as_data_source(split=split)  # type: ignore[call-arg]
