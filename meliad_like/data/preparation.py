"""Turns a source of documents into a token store, at once or in parts on several machines.

STORE.parts/parts.json    the settings that all parts have in common, and the number of parts
STORE.parts/vocabulary/   the vocabulary, made with the part that is begun first
STORE.parts/3/part.json   what else the store has to know of a part: totals, documents that were left out
STORE.parts/3/train/ ...  the splits of a part, as in a token store
"""

import contextlib
import itertools
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar
from urllib.parse import quote

from etils import epath
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from meliad_like.caches import cache_folder
from meliad_like.data.encoding import encode_all, read_all
from meliad_like.data.split import copies
from meliad_like.data.split_writer import SplitWriter, repeated_name
from meliad_like.data.token_store import (
    FORMAT_VERSION,
    NAMES_NAME,
    STORE_NAME,
    TokenStore,
    Totals,
    absolute_folder,
    files_fingerprint,
    read_info,
    short,
    token_dtype,
    version_name,
    write_info,
)
from meliad_like.errors import UserError, one_line, refusals
from meliad_like.registry import fingerprint
from meliad_like.remote import AnyPath, any_path, copy_folder, is_remote
from meliad_like.resumable import check_same, locked, read_json, whole_folder, write_json
from meliad_like.sources.base import (
    SOURCES,
    SPLITS,
    BadDocumentError,
    Source,
    SourceConfig,
    SourceFile,
    fill_splits,
    open_source,
    source_fingerprint,
)
from meliad_like.tables import Table
from meliad_like.vocabularies.base import Vocabulary, VocabularyConfig, load_vocabulary

Result = TypeVar("Result")
SHOWN = 10  # The number of reasons for left-out documents that are printed.
CONSOLE = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
PARTS_NAME, PART_NAME, VOCABULARY_NAME = "parts.json", "part.json", "vocabulary"


@dataclass(frozen=True)
class Written:
    """The results of writing all documents, or a part of them."""

    splits: dict[str, Totals]
    skipped: list[str]
    """The reasons why documents, or files of documents, were left out."""
    changed: int
    """The number of documents of which decoding their tokens does not give the text."""


class Work(NamedTuple):
    """A version of a token store that has to be written, and from what."""

    folder: AnyPath
    """The folder of the store, or of its next version in it."""
    earlier: TokenStore | None
    """The version before; None: this is the first."""
    files: Sequence[SourceFile]
    """The files of the source whose documents are written."""
    config: SourceConfig
    source: Source
    vocabulary: VocabularyConfig


def prepare(
    source: SourceConfig,
    vocabulary: VocabularyConfig,
    folder: epath.PathLike,
    num_workers: int = 0,
    *,
    for_training: bool = False,
) -> TokenStore:
    """Opens the token store of these documents and this vocabulary in `folder`, or writes it if there is none.

    A store appears in `folder` only when it is complete. If `prepare_part` has begun it, the parts are joined. Where
    the source has all documents of the store and others, these are added as its next version, in the same vocabulary. A
    store for an object store is made in the user's cache directory, where this machine's trainings look for a copy, and
    then copied; if that is interrupted, it is copied again. Progress, warnings and a table go to standard error. Raises
    a UserError if `folder` holds something else, a document is bad, a part is missing, or the disk is full.

    Args:
      num_workers: number of processes that read and tokenise (0: one per core). The store does not depend on it.
      for_training: whether a store without training documents is refused.
    """
    opened = open_source(source)
    if is_remote(folder):
        place, local = any_path(folder), _prepared(folder)
        try:
            work = None if local.exists() else _work(place, source, opened, vocabulary)
            if work and work.earlier:
                added = _prepared(work.folder)
                shutil.rmtree(added, ignore_errors=True)
                _write_version(added, work, num_workers, for_training)
                _upload(added, work.folder)
            elif work or local.exists():
                prepare(source, vocabulary, local, num_workers, for_training=for_training)
                _upload(local, place)
            return TokenStore(place)
        except refusals() as error:
            problem = f"the token store {place} can't be written or read: {one_line(error)}"
            raise UserError(f"{problem}; the same command tries again") from None
    folder, parts = _places(folder)
    # A second process waits here, and then finds the complete store.
    with locked(folder.parent / f".{folder.name}.lock"):
        if work := _work(folder, source, opened, vocabulary):
            _write_version(Path(work.folder), work, num_workers, for_training, parts)
            shutil.rmtree(parts, ignore_errors=True)
    store = TokenStore(folder)
    # Copies are looked for once: where documents are small, many must be compared.
    for warning in (*_warnings(opened, store), *(_warnings_of_copies(store) if work else ())):
        CONSOLE.print(warning, style="yellow")
    _print_table(store)
    return store


def _prepared(place: epath.PathLike) -> Path:
    """The folder in which what is for an object store is made."""
    return cache_folder("prepared") / quote(os.fspath(place), safe="")


def _upload(local: Path, place: AnyPath) -> None:
    """Copies a version of a token store to an object store, and keeps it as this machine's copy."""
    CONSOLE.print(f"copying the token store to {place}")
    copy_folder(epath.Path(local), epath.Path(place), last=STORE_NAME)
    copy = cache_folder("stores") / read_info(local).fingerprint
    copy.parent.mkdir(exist_ok=True)
    shutil.rmtree(local) if copy.exists() else local.rename(copy)


def _write_version(folder: Path, work: Work, num_workers: int, for_training: bool, parts: Path | None = None) -> None:
    """Writes the first version of a token store, joining its `parts` if there are any, or what a further one adds."""
    config, source, earlier = work.config, work.source, work.earlier
    with whole_folder(folder) as incomplete:
        if earlier:
            encoder, before = earlier.vocabulary, [earlier.fingerprint]
            written = _write(incomplete, earlier.folder, config, source.only(work.files), num_workers)
        elif parts and (parts / PARTS_NAME).exists():
            (encoder, written), before = _join(incomplete, parts, work), []
        else:
            filled, before = fill_splits(config, source), []
            encoder = _make_vocabulary(config, filled, work.vocabulary)
            encoder.save(incomplete)
            written = _write(incomplete, incomplete, config, filled, num_workers)
        _check_store(incomplete, work, written, for_training)
        contents = source_fingerprint(config, source)
        write_info(
            incomplete,
            source,
            work.files,
            fingerprint=fingerprint([FORMAT_VERSION, contents, encoder.fingerprint, *before]),
            source=contents,
            source_settings=config.settings_fingerprint,
            settings={"source": config.settings, "vocabulary": work.vocabulary.settings},
            folder=absolute_folder(config) or source.place,
            vocabulary=encoder.fingerprint,
            vocabulary_settings=work.vocabulary.settings_fingerprint,
            dtype=token_dtype(encoder.size),
            **vars(written),
        )


def prepare_part(
    source: SourceConfig,
    vocabulary: VocabularyConfig,
    folder: epath.PathLike,
    part: int,
    number: int,
    num_workers: int = 0,
) -> None:
    """Writes a part of the token store in `folder`, if it is not there: `part`, from 1, of a `number` of parts.

    The machines that make parts, at any time and in any order, share the disk. `prepare` then joins the parts to the
    same store, byte for byte, as it makes alone. Raises a UserError if parts of other settings or documents are there,
    a document is bad, or the disk is full.
    """
    if not 1 <= part <= number:
        raise UserError(f"--part={part}/{number} must be one of 1/{number} to {number}/{number}")
    if is_remote(folder):
        raise UserError(f"--part makes a part of a token store on a disk that the machines share, not of {folder}")
    folder, parts = _places(folder)
    opened = open_source(source)
    work = _work(folder, source, opened, vocabulary)
    if work is None:
        return
    if work.earlier:
        raise UserError(f"--part makes parts of a new token store alone: the same command without it adds to {folder}")
    opened = fill_splits(source, opened)
    with locked(parts / ".lock"):
        if (parts / PARTS_NAME).exists():
            _check_parts(parts, work, number)
        else:
            write_json(parts / PARTS_NAME, _identity(work, number))
        if not (parts / VOCABULARY_NAME).exists():
            with whole_folder(parts / VOCABULARY_NAME) as incomplete:
                _make_vocabulary(source, opened, vocabulary).save(incomplete)
    part_folder = parts / str(part)
    with locked(parts / f".{part}.lock"):
        if part_folder.exists():
            CONSOLE.print(f"reusing part {part}/{number} in {part_folder}")
            return
        with whole_folder(part_folder) as incomplete:
            documents = opened.part(part - 1, number)
            written = _write(incomplete, parts / VOCABULARY_NAME, source, documents, num_workers)
            write_json(incomplete / PART_NAME, asdict(written) | {"contents": documents.contents})
    CONSOLE.print(f"part {part}/{number} is in {part_folder}")


def _places(folder: epath.PathLike) -> tuple[Path, Path]:
    """The folders of a token store and of its parts."""
    folder = Path(folder).expanduser().absolute()
    return folder, folder.with_name(f"{folder.name}.parts")


def _work(folder: AnyPath, config: SourceConfig, source: Source, vocabulary: VocabularyConfig) -> Work | None:
    """The documents that the token store of these settings in a folder lacks; None: it has all of them."""
    if not folder.exists() or not any(folder.iterdir()):
        return Work(folder, None, source.files, config, source, vocabulary)
    if not (folder / STORE_NAME).exists():
        raise UserError(f"{folder} is neither empty nor a token store: choose another --store")
    store = TokenStore(folder)
    added = store.check_settings(config, vocabulary, source)
    # Documents without a folder, such as another Python's, can't be looked at without being opened.
    if not config.folder and (added := store.added_files(config, source)) is None:
        way_out = "delete the token store, or choose another --store"
        contents = source_fingerprint(config, source)
        check_same(folder, {"source": store.info.source}, {"source": contents}, way_out=way_out)
    if not added:
        CONSOLE.print(f"reusing the token store {folder}")
        return None
    version = version_name(store.version + 1)
    CONSOLE.print(f"adding to the token store {folder}, as {version}, in its vocabulary: {len(added)} new files")
    return Work(folder / version, store, added, config, source, vocabulary)


def _identity(work: Work, number: int) -> dict[str, object]:
    """The settings that all parts of a store have in common, and their number."""
    settings = {"source": work.config.settings, "vocabulary": work.vocabulary.settings}
    files = {"names, sizes and times of files": short(files_fingerprint(work.source))}
    return {"version": FORMAT_VERSION, **settings, **files, "parts": number}


def _check_parts(parts: Path, work: Work, number: int | None = None) -> int:
    """The number of parts, which have to be of these settings and files; `number`: what it has to be."""
    saved = read_json(parts / PARTS_NAME)
    current = _identity(work, number or saved["parts"])
    check_same(parts, saved, current, way_out="delete it, or choose another --store")
    return saved["parts"]


def _join(folder: Path, parts: Path, work: Work) -> tuple[Vocabulary, Written]:
    """Writes the splits of all parts, one part after the other, and their vocabulary."""
    number = _check_parts(parts, work)
    if missing := [f"{i}/{number}" for i in range(1, number + 1) if not (parts / str(i)).exists()]:
        way_out = f"make them with --part={', '.join(missing[:SHOWN])}, or delete the folder to begin again"
        raise UserError(f"{len(missing)} of the {number} parts in {parts} are not there: {way_out}")
    shutil.copytree(parts / VOCABULARY_NAME, folder, dirs_exist_ok=True)
    vocabulary, skipped, changed = load_vocabulary(folder), [], 0
    writers = {split: SplitWriter(folder / split, vocabulary) for split in SPLITS}
    for i in range(1, number + 1):
        part = read_json(parts / str(i) / PART_NAME)
        for split, writer in writers.items():
            writer.append(parts / str(i) / split, Totals(**part["splits"][split]))
        skipped += part["skipped"]
        changed += part["changed"]
        work.source.contents.update(part["contents"])
    return vocabulary, Written({split: writer.close() for split, writer in writers.items()}, skipped, changed)


def _make_vocabulary(config: SourceConfig, source: Source, vocabulary: VocabularyConfig) -> Vocabulary:
    if not vocabulary.trained:
        return vocabulary.make()

    def texts() -> Iterator[str]:
        for document in _good(read_all(source), config, source, [], "reading documents for the vocabulary"):
            if document.split == "train":
                yield document.text
        CONSOLE.print("learning the vocabulary")

    return vocabulary.make(texts())


def _good(
    results: Iterable[Result | BadDocumentError], config: SourceConfig, source: Source, skipped: list[str], what: str
) -> Iterator[Result]:
    """The results that are not bad documents, while a progress bar shows their number and `what` is done. The reasons
    of those that the config leaves out are added to `skipped`.

    At the end, if there are others, it prints the first reasons of each kind and raises a UserError with the numbers.
    """
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    kinds: dict[str, list[str]] = {}
    with Progress(*columns, console=CONSOLE) as progress:
        for result in progress.track(results, total=source.num_documents):
            if not isinstance(result, BadDocumentError):
                yield result
            elif result.policy and getattr(config, result.policy) == "skip":
                skipped.append(str(result))
            else:
                kinds.setdefault(result.kind, []).append(str(result))
    if not kinds:
        return
    first, *further = itertools.chain.from_iterable(kinds.values())
    if not further:
        raise UserError(first)
    for kind, reasons in kinds.items():
        CONSOLE.print("\n".join(reasons[:SHOWN]), style="yellow")
        if len(reasons) > SHOWN:
            CONSOLE.print(f"... and {len(reasons) - SHOWN} more that {kind}", style="yellow")
    numbers = "; ".join(f"{len(reasons)} {kind} ({reasons[0]})" for kind, reasons in kinds.items())
    raise UserError(f"documents can't be used: {numbers}")


def _write(folder: Path, vocabulary: AnyPath, config: SourceConfig, source: Source, num_workers: int) -> Written:
    """Writes all documents in order, with the saved vocabulary. Raises a UserError as `_good` does."""
    loaded = load_vocabulary(vocabulary)
    writers = {split: SplitWriter(folder / split, loaded) for split in SPLITS}
    skipped, changed = [], 0
    with contextlib.closing(encode_all(source, vocabulary, num_workers, folder)) as encoded:
        for document in _good(encoded, config, source, skipped, "tokenising"):
            sizes = document.num_bytes, document.num_words
            writers[document.split].write(document.name, document.tokens, *sizes, document.unscored)
            changed += not document.restored
            skipped += document.skipped
            source.contents.update(document.contents)
    return Written({split: writer.close() for split, writer in writers.items()}, skipped, changed)


def _check_store(folder: Path, work: Work, written: Written, for_training: bool) -> None:
    """Raises a UserError if documents of a split have one name, or a listed or all training documents are missing."""
    config, source, earlier = work.config, work.source, work.earlier.folders if work.earlier else []
    # `fill_splits` may have taken a document out of its split, where the same document must not come again.
    for splits in [SPLITS] if earlier and source.by_share else [(split,) for split in SPLITS]:
        if (repeated := repeated_name(place / split for place in (*earlier, folder) for split in splits)) is not None:
            name, first, second = repeated
            way_out = "rename one of them, or name another field in RecordsSourceConfig.name_field ('': numbers)"
            raise UserError(f"documents {first} and {second} of {', '.join(splits)} are both named {name!r}: {way_out}")
    if earlier:
        return
    left_out = f"{len(written.skipped)} were left out"
    if config.listed:
        names = [(folder / split / NAMES_NAME).read_bytes() for split in ("validation", "test")]
        text = "\n" + b"".join(names).decode(errors="surrogatepass")
        if unknown := [name for name in sorted(config.listed) if f"\n{name}\n" not in text]:
            problem = f"validation_documents or test_documents names {unknown[0]!r}"
            raise UserError(f"{problem}, which is not a document of the source ({left_out})")
    numbers = {split: totals.documents for split, totals in written.splits.items()}
    if not any(numbers.values()) or (for_training and not numbers["train"]):
        counts = ", ".join(f"{number} for {split}" for split, number in numbers.items())
        problem = f"the {SOURCES.name_of(config)} source has no documents for training: {counts} ({left_out})"
        raise UserError(f"{problem}; {source.passed_over or 'no files were passed over'}")


def _warnings(source: Source, store: TokenStore) -> Iterator[str]:
    if not store.vocabulary.lossless or store.info.changed:
        yield "this vocabulary does not keep every text exactly: bits per byte are not comparable with others'"
    if unscored := sum(totals.unscored for totals in store.info.splits.values()):
        total = sum(totals.tokens for totals in store.info.splits.values())
        yield f"{unscored:,} of {total:,} tokens are read and cost no loss"
    if store.info.changed:
        total = sum(totals.documents for totals in store.info.splits.values())
        share = f"{store.info.changed:,} of {total:,} documents ({store.info.changed / total:.1%})"
        yield f"{share} do not come back from their tokens as they were"
    skipped = store.info.skipped
    yield from (f"left out: {reason}" for reason in skipped[:SHOWN])
    if len(skipped) > SHOWN:
        yield f"... and {len(skipped) - SHOWN} more, in {store.folder / STORE_NAME}"
    if source.passed_over:
        yield source.passed_over
    for split in ("validation", "test"):
        if not store.totals(split).documents:
            advice = f"raise SourceConfig.{split}_share, or " if source.by_share else ""
            yield f"no document is for {split}: {advice}name some in SourceConfig.{split}_documents"


def _warnings_of_copies(store: TokenStore) -> Iterator[str]:
    for split in ("validation", "test"):
        if not (store.totals(split).documents and store.totals("train").documents):
            continue
        documents, train = store.split(split), store.split("train")
        if pairs := copies(documents, train):
            number = f"{len(pairs):,} of {len(documents):,} documents for {split}"
            example = f"{documents.names[pairs[0][0]]!r} of {train.names[pairs[0][1]]!r}"
            yield f"{number} are copies of some for training, such as {example}, and lower its loss: remove them"


def _print_table(store: TokenStore) -> None:
    rows = []
    for name, totals in store.info.splits.items():
        longest = int(store.split(name).lengths.max()) if totals.documents else 0
        counts = (totals.documents, totals.tokens, totals.bytes, totals.words, longest)
        rows.append((name, *(f"{count:,}" for count in counts)))
    header = ("split", "documents", "tokens", "bytes", "words", "longest (tokens)")
    table = Table(f"{store.folder.name}, vocabulary of {store.vocabulary.size}", header, rows)
    CONSOLE.print(table.to_rich(), soft_wrap=False)
