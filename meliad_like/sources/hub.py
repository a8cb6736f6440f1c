"""Data sets of the Hugging Face Hub, whose files are read through hf:// as those of a folder are.

The library `datasets` would write a copy of each data set to the disk, or stream records that have no place in a file.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from fsspec.utils import glob_translate

from meliad_like.errors import UserError, one_line, reading, refusals
from meliad_like.remote import AnyPath, Version, any_path
from meliad_like.sources.base import SOURCES, Document, Source, SourceFile
from meliad_like.sources.files import list_files
from meliad_like.sources.named_splits import named_splits, splits_of_path
from meliad_like.sources.records import JsonLinesSource, ParquetSource

CARD_NAME = "README.md"
CONVERTED = "refs/convert/parquet"
"""The branch in which the Hub keeps parquet files of data sets in other formats."""


@SOURCES.register("huggingface")
class HuggingFaceSource(ParquetSource, JsonLinesSource):
    """A data set of the Hugging Face Hub, in parquet files or JSON lines. Its card, or otherwise the names of folders
    and files, say which files are of which split.

    `folder` may name a copy (`hf download NAME --repo-type dataset --local-dir DIR`), which is then read instead.
    """

    dataset: str = ""
    """The name of the data set, such as `emozilla/pg19`."""
    configuration: str = ""
    """A configuration of the data set; "": its default."""
    revision: str = "main"
    """A branch, a tag or a commit. The token store is of the commit that is read. The Hub converts data sets in other
    formats to parquet in the branch `refs/convert/parquet`."""

    usual_suffixes = (*ParquetSource.usual_suffixes, *JsonLinesSource.usual_suffixes, ".json")
    unreadable = "is damaged"

    def open(self) -> Source:
        opened = super().open()
        if self.folder:
            return opened
        commit = opened.place.rpartition("@")[2]
        about = SourceFile("commit", opened.place, Version(0, commit, commit), None)
        return replace(opened, files=(*opened.files, about))

    def find_files(self) -> tuple[AnyPath, dict[str, Version], dict[str, str], str]:
        root = self.existing_folder() if self.folder else self._commit()
        listed, passed_over = list_files(root, self.suffixes or self.usual_suffixes, (CARD_NAME, *self.exclude))
        config = self._config_of_card(root)
        if patterns := config.get("data_files"):
            splits = self._splits_of_card(root / CARD_NAME, patterns, listed)
            files = sorted(splits)
        else:
            default = self.configuration or ("default" if self.revision == CONVERTED else "")
            inside = config.get("data_dir", "").strip("/") if config else default
            files = [file for file in listed if file.startswith(f"{inside}/" if inside else "")]
            splits = named_splits(self, root, files, splits_of_path)
        if cut := next((file for file in files if re.search(r"(^|/)partial-\w+/", file)), None):
            raise UserError(f"{root / cut} is of the first 5 GB of the data set alone: name another revision")
        if not files:
            suffixes, name = ", ".join(self.usual_suffixes), self.configuration or "default"
            problem = f"{root} has no files of the configuration {name!r} with a suffix of {suffixes}"
            raise UserError(f"{problem}: perhaps HuggingFaceSource.revision = {CONVERTED!r} has")
        if len({file.endswith(ParquetSource.usual_suffixes) for file in files}) > 1:
            way_out = "HuggingFaceSource.suffixes = ('.parquet',) reads the first alone"
            raise UserError(f"{root} has parquet files and JSON lines, perhaps of the same documents: {way_out}")
        used = splits if self.splits_by_name and not self.listed else {}
        return root, {file: listed[file] for file in files}, used, passed_over

    def _commit(self) -> AnyPath:
        """The folder of the commit to read."""
        # It takes half a second, and worker processes import this module.
        from huggingface_hub import HfApi

        if not self.dataset:
            raise UserError("name a data set of the Hub, HuggingFaceSource.dataset = 'ORG/NAME'")
        try:
            commit = HfApi().dataset_info(self.dataset, revision=self.revision).sha
        except refusals() as error:
            what = f"the data set {self.dataset!r} of the Hub, revision {self.revision!r},"
            reason = f"{one_line(error)}; FolderSourceConfig.folder may name a copy"
            raise UserError(f"{what} can't be read: {reason}") from None
        return any_path(f"hf://datasets/{self.dataset}@{commit}")

    def _config_of_card(self, root: AnyPath) -> dict[str, Any]:
        """The fields of the configuration in the card; empty if the card has no configurations."""
        from huggingface_hub import DatasetCard
        from yaml import YAMLError

        card = root / CARD_NAME
        text = card.read_text() if card.exists() else ""
        # A card with nothing but text.
        if not text.startswith("---"):
            return {}
        with reading(card, "card of a data set", ValueError, TypeError, KeyError, AttributeError, YAMLError):
            saved = DatasetCard(text).data.to_dict().get("configs", ())
            configs = {config["config_name"]: config | {"data_files": _patterns(config)} for config in saved}
            defaults = [name for name, config in configs.items() if name == "default" or config.get("default")]
        name = self.configuration or next(iter(defaults or (configs if len(configs) == 1 else ())), "")
        if configs and name not in configs:
            names = ", ".join(map(repr, configs))
            raise UserError(f"{card} has the configurations {names}: choose HuggingFaceSource.configuration")
        return configs.get(name, {})

    def _splits_of_card(
        self, card: AnyPath, patterns: Iterable[tuple[str, str]], listed: Iterable[str]
    ) -> dict[str, str]:
        """The split of each file that a card names."""
        splits: dict[str, str] = {}
        for split, pattern in patterns:
            matches = [file for file in listed if re.fullmatch(glob_translate(pattern), file)]
            if not (matches or self.exclude):
                problem = f"names files {pattern!r}, of which none has a suffix of {', '.join(self.usual_suffixes)}"
                raise UserError(f"{card} {problem}: perhaps HuggingFaceSource.revision = {CONVERTED!r} has")
            if matches and len(known := splits_of_path(f"{split}/")) != 1:
                way_out = "leave its files out with HuggingFaceSource.exclude"
                raise UserError(f"{card} has a split {split!r}, none of train, validation and test: {way_out}")
            for file in matches:
                if splits.setdefault(file, min(known)) not in known:
                    raise UserError(f"{card} names {file} for {splits[file]} and for {split}")
        return splits

    def records(self, path: AnyPath, hashed: Callable[[str], None] | None) -> Iterator[Any]:
        return (ParquetSource if path.suffix == ".parquet" else JsonLinesSource).records(self, path, hashed)

    def damage(self) -> tuple[type[Exception], ...]:
        return ParquetSource.damage(self) + JsonLinesSource.damage(self)

    def read(self, record: Any, place: str, found_in: str | None) -> Document:
        return (JsonLinesSource if isinstance(record, bytes) else ParquetSource).read(self, record, place, found_in)


def _patterns(config: dict[str, Any]) -> list[tuple[str, str]]:
    """Pairs (split, pattern of files) of a configuration in a card."""
    data_files, pairs = config.get("data_files") or (), []
    inside = f"{config['data_dir'].strip('/')}/" if config.get("data_dir") else ""
    for entry in [data_files] if isinstance(data_files, str) else data_files:
        split, paths = ("train", entry) if isinstance(entry, str) else (entry["split"], entry["path"])
        paths = [paths] if isinstance(paths, str) else paths
        pairs += [(split, inside + path.removeprefix("./")) for path in paths]
    return pairs
