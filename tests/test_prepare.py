import dataclasses
import gzip
import itertools
import json
import multiprocessing
import os
import shlex
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import forked
import pytest

from meliad_like.data import encoding, preparation
from meliad_like.data.encoding import encode_all
from meliad_like.data.preparation import prepare, prepare_part
from meliad_like.data.split_writer import SplitWriter
from meliad_like.data.token_store import TokenStore
from meliad_like.errors import UserError
from meliad_like.sources.base import open_source
from meliad_like.sources.files import RepositoriesSource, TextSource
from meliad_like.sources.records import JsonLinesSource
from meliad_like.vocabularies.base import BytesVocabularyConfig, ByteVocabulary
from meliad_like.vocabularies.dictionary import DictionaryVocabularyConfig
from meliad_like.vocabularies.sentencepiece import SentencePieceVocabularyConfig

BYTES = BytesVocabularyConfig()


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(30):
        (folder / f"{i}.txt").write_text(f"Document {i}, with a few words in it.\n" * (i + 1))
    return folder


def config(folder, **settings):
    return TextSource(folder=str(folder), test_documents=("7",), **settings)


def files(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_processes_change_nothing(texts, tmp_path):
    vocabulary = SentencePieceVocabularyConfig(size=290)
    for num_workers in (1, 2):
        prepare(config(texts), vocabulary, tmp_path / f"store{num_workers}", num_workers)
    assert files(tmp_path / "store1") == files(tmp_path / "store2")


def test_many_tokens_pass_through_a_file(texts, tmp_path, monkeypatch):
    prepare(config(texts), BYTES, tmp_path / "store1", 1)
    monkeypatch.setattr(encoding, "ProcessPoolExecutor", lambda number, *_: ThreadPoolExecutor(number))
    monkeypatch.setattr(encoding, "CHUNK_BYTES", 1000)
    prepare(config(texts), BYTES, tmp_path / "store2", 2)
    assert files(tmp_path / "store1") == files(tmp_path / "store2")


def test_trained_vocabulary_sees_training_documents_only(texts, tmp_path, capsys):
    (texts / "7.txt").write_text("\u6f22" * 5000)
    prepare(config(texts), SentencePieceVocabularyConfig(size=290), tmp_path / "store", 1)
    vocabulary = TokenStore(tmp_path / "store").vocabulary
    assert len(vocabulary.encode("\u6f22")) == 3
    assert len(vocabulary.encode("few")) < 4
    # Both are shown before the slow steps that they announce.
    shown = capsys.readouterr().err
    assert 0 <= shown.index("reading documents for the vocabulary") < shown.index("learning the vocabulary")


def test_documents_that_the_vocabulary_changes_are_counted(texts, tmp_path, capsys):
    for name in ("9.txt", "11.txt"):
        (texts / name).write_text("a line ")  # as it is decoded
    store = prepare(config(texts), DictionaryVocabularyConfig(), tmp_path / "store", 1)
    assert store.info.changed == 28
    assert "28 of 30 documents (93.3%) do not come back from their tokens as they were" in capsys.readouterr().err
    assert prepare(config(texts), BYTES, tmp_path / "bytes", 1).info.changed == 0
    assert "do not come back" not in capsys.readouterr().err


def test_second_run_reuses(texts, tmp_path, capsys, monkeypatch):
    first = prepare(config(texts), BYTES, tmp_path / "store", 1)
    for name in ("_write", "source_fingerprint"):
        monkeypatch.setattr(preparation, name, None)
    second = prepare(config(texts), BYTES, tmp_path / "store", 1)
    assert second.fingerprint == first.fingerprint
    assert "reusing the token store" in capsys.readouterr().err


def test_other_documents_in_the_same_folder(texts, tmp_path):
    prepare(config(texts), BYTES, tmp_path / "store", 1)
    (texts / "3.txt").write_text("changed")
    with pytest.raises(
        UserError, match="made from the documents in .*texts, which have changed since: .* prepare another"
    ):
        prepare(config(texts), BYTES, tmp_path / "store", 1)


def test_other_vocabulary_in_the_same_folder(texts, tmp_path):
    prepare(config(texts), BYTES, tmp_path / "store", 1)
    message = (
        "was made by other vocabulary settings than this run's: vocabulary.size_multiple is 1 there, 8 here; "
        ".*, or prepare an.* delete this one and make it again with python -m meliad_like.prepare --store=.*store"
    )
    with pytest.raises(UserError, match=message):
        prepare(config(texts), BytesVocabularyConfig(size_multiple=8), tmp_path / "store", 1)


def test_folder_with_something_else(texts, tmp_path):
    for make in (partial(prepare, num_workers=1), partial(prepare_part, part=1, number=2)):
        with pytest.raises(UserError, match="texts is neither empty nor a token store"):
            make(config(texts), BYTES, texts)


@pytest.mark.parametrize(
    "data, message, skip, num_workers",
    [
        (b" \n", "document 5 is empty", "empty", 1),
        (b"caf\xe9", "5.txt is not UTF-8 .byte 0xe9 at offset 3", "undecodable", 2),
    ],
)
def test_bad_document_stops_or_is_skipped(texts, tmp_path, capsys, data, message, skip, num_workers):
    (texts / "5.txt").write_bytes(data)
    with pytest.raises(UserError, match=message):
        prepare(config(texts), BYTES, tmp_path / "store", 1)
    assert not list(tmp_path.glob("store*"))
    store = prepare(config(texts, **{skip: "skip"}), BYTES, tmp_path / "store", num_workers)
    assert "5" not in store.split("train").names
    assert "left out:" in capsys.readouterr().err and len(store.info.skipped) == 1


@pytest.mark.parametrize("vocabulary", [BYTES, SentencePieceVocabularyConfig(size=290)])
def test_all_bad_documents_are_read_and_counted(texts, tmp_path, capsys, vocabulary):
    for i in range(12):
        (texts / f"{i}.txt").write_bytes(b"\xff")
    (texts / "20.txt").write_text("")
    message = "12 are not UTF-8 .*0.txt is not.*undecodable = 'skip'.; 1 are empty .*empty = 'skip'."
    with pytest.raises(UserError, match=message):
        prepare(TextSource(folder=str(texts)), vocabulary, tmp_path / "store", 1)
    shown = capsys.readouterr().err
    assert shown.count("is not UTF-8 (byte 0xff at offset 0)") == 10 and "... and 2 more that are not UTF-8" in shown


def test_all_bad_records_are_read_and_counted(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{}\n[]\n{"text": 1}\n')
    (tmp_path / "b.jsonl.gz").write_bytes(b"no gzip")
    (tmp_path / "c.jsonl").write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(
        UserError, match=r"3 are not records .*a.jsonl:2.*; 1 can't be read .*b.jsonl.gz.*; 1 are not UTF"
    ):
        prepare(JsonLinesSource(folder=str(tmp_path)), BYTES, tmp_path / "store", 1)


def test_ctrl_c_while_documents_are_read_for_the_vocabulary(texts, tmp_path, monkeypatch):
    """SentencePiece makes an error of its own of it."""

    def read(reference):
        if reference().name == "12":
            raise KeyboardInterrupt
        return reference()

    monkeypatch.setattr(encoding, "read", read)
    with pytest.raises(KeyboardInterrupt):
        prepare(config(texts), SentencePieceVocabularyConfig(size=290), tmp_path / "store", 1)
    assert not list(tmp_path.glob("store*"))


def test_thirty_documents_have_some_for_each_split(texts, tmp_path):
    source = TextSource(folder=str(texts), validation_share=1e-6, test_share=1e-6)
    store = prepare(source, SentencePieceVocabularyConfig(size=290), tmp_path / "store", 1)
    assert [store.totals(split).documents for split in ("train", "validation", "test")] == [28, 1, 1]


def test_nothing_left(tmp_path):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(UserError, match="no documents for training: 0 for train, .* .1 were left out."):
        prepare(TextSource(folder=str(tmp_path), empty="skip"), BYTES, tmp_path / "store", 1)


@pytest.mark.parametrize("parts", [0, 2])
def test_names_that_are_given_twice(tmp_path, parts):
    """In one split; documents of two splits may have the same name, such as their number in it."""
    documents = tmp_path / "documents"
    documents.mkdir()
    records = [{"id": name, "text": "a"} for name in ("b", "a", "c", "b")]
    for name, chosen in ("train", records), ("test", records[:3]):
        (documents / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in chosen))
    source = JsonLinesSource(folder=str(documents), name_field="id")
    for part in range(parts):
        prepare_part(source, BYTES, tmp_path / "store", part + 1, parts, num_workers=1)
    with pytest.raises(UserError, match="^documents 1 and 4 of train are both named 'b': .* RecordsSourceConfig.name_"):
        prepare(source, BYTES, tmp_path / "store", 1)
    assert prepare(dataclasses.replace(source, name_field=""), BYTES, tmp_path / "numbered", 1)


def test_listed_document_that_is_missing(texts, tmp_path):
    with pytest.raises(UserError, match="validation_documents or test_documents names 'persuasion'"):
        prepare(config(texts, validation_documents=("persuasion",)), BYTES, tmp_path / "store", 1)


def test_listed_document_that_is_left_out(texts, tmp_path):
    (texts / "7.txt").write_text("")
    with pytest.raises(UserError, match="names '7', which is not a document of the source .1 were left out"):
        prepare(config(texts, empty="skip"), BYTES, tmp_path / "store", 1)


def test_full_disk(texts, tmp_path, monkeypatch):
    def write(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SplitWriter, "write", write)
    with pytest.raises(UserError, match="the disk is full: no room for .*store"):
        prepare(config(texts), BYTES, tmp_path / "store", 1)
    assert not list(tmp_path.glob("store*"))


def test_killed_run_leaves_nothing_that_looks_complete(texts, tmp_path):
    script = (
        "import os\n"
        "from meliad_like.sources.files import TextSource\n"
        "from meliad_like.data.preparation import *\n"
        "from meliad_like.vocabularies.base import BytesVocabularyConfig\n"
        "SplitWriter.close = lambda self: os.kill(os.getpid(), 9)\n"
        f"prepare({config(texts)!r}, {BYTES!r}, {str(tmp_path / 'store')!r}, 1)"
    )
    assert forked.run("-c", script).returncode == -9
    assert (tmp_path / "store.incomplete").exists()
    with pytest.raises(UserError, match="no token store"):
        TokenStore(tmp_path / "store")
    assert len(prepare(config(texts), BYTES, tmp_path / "store", 1).split("train")) == 29
    assert not (tmp_path / "store.incomplete").exists()


def add(folder, numbers):
    for i in numbers:
        (folder / f"new{i}.txt").write_text(f"Added document {i}.\n" * (i + 1))


def contents(store):
    """(split, name) -> tokens of all documents, in the order of the store."""
    found = {}
    for split in (split for split in store.info.splits if store.totals(split).documents):
        documents = store.split(split)
        for i, name in enumerate(documents.names):
            found[split, name] = documents.tokens(i, 0, int(documents.lengths[i])).tolist()
    return found


def test_a_store_grows(texts, tmp_path, monkeypatch, capsys):
    """By versions that keep the documents of those before, with their numbers and splits; twice."""
    source = TextSource(folder=str(texts), validation_share=0.2, test_share=0.2)
    stores = [prepare(source, BYTES, tmp_path / "store", 1)]
    before = files(tmp_path / "store")
    tokenised, encode = [], encoding._encode
    monkeypatch.setattr(encoding, "_encode", lambda *given: tokenised.append(given[1].name) or encode(*given))
    for numbers in range(20), range(20, 25):
        add(texts, numbers)
        capsys.readouterr()
        stores.append(prepare(source, BYTES, tmp_path / "store", 1))
        assert f"in its vocabulary: {len(numbers)} new files" in capsys.readouterr().err
        assert sorted(tokenised) == sorted(f"new{i}" for i in numbers)
        tokenised.clear()
    for old, new in itertools.pairwise(stores):
        for split in old.info.splits:
            assert new.split(split).names[: len(old.split(split))] == list(old.split(split).names)
        assert contents(new) == contents(new) | contents(old)
    at_once = prepare(source, BYTES, tmp_path / "at_once", 1)
    assert contents(stores[-1]) == contents(at_once)
    for split in at_once.info.splits:
        assert dataclasses.astuple(stores[-1].totals(split))[:4] == dataclasses.astuple(at_once.totals(split))[:4]
    # Not the same order: neither can take the place of the other.
    assert len({store.fingerprint for store in (*stores, at_once)}) == 4
    # Nothing of an earlier version has changed, and each can be opened.
    assert files(tmp_path / "store").items() > before.items()
    for store in stores:
        read = stores[-1].read_by([store.fingerprint])
        assert read.fingerprint == store.fingerprint and contents(read) == contents(store)
    assert stores[-1].read_by(["another"]).version == 3
    prepare(source, BYTES, tmp_path / "store", 1)
    assert "reusing the token store" in capsys.readouterr().err and not (tmp_path / "store" / "version-4").exists()


def test_a_growing_store_keeps_its_vocabulary(texts, tmp_path, monkeypatch):
    vocabulary = SentencePieceVocabularyConfig(size=290)
    old = prepare(config(texts), vocabulary, tmp_path / "store", 1)
    monkeypatch.setattr(preparation, "_make_vocabulary", None)
    add(texts, range(9))
    new = prepare(config(texts), vocabulary, tmp_path / "store", 2)
    assert new.info.vocabulary == old.info.vocabulary and new.totals("train").documents == 38


@pytest.mark.parametrize("change", ["changed", "removed", "renamed", "same_stem"])
def test_a_store_does_not_grow_where_old_documents_have_changed(change, texts, tmp_path):
    source = config(texts, suffixes=(".txt", ".md"))
    prepare(source, BYTES, tmp_path / "store", 1)
    add(texts, range(3))
    (texts / "sub").mkdir()
    if change == "changed":
        (texts / "3.txt").write_text("changed")
    elif change == "removed":
        (texts / "3.txt").unlink()
    elif change == "renamed":
        (texts / "3.txt").rename(texts / "sub" / "3.txt")
    else:
        (texts / "3.md").write_text("the first one's name now has its suffix")
    before = files(tmp_path / "store")
    with pytest.raises(UserError, match="texts, which have changed since"):
        prepare(source, BYTES, tmp_path / "store", 1)
    assert files(tmp_path / "store") == before


def test_a_moved_folder_grows_and_a_repository_does_not(texts, tmp_path):
    """Contents are compared where times differ. A further file of a repository changes a document."""
    prepare(config(texts), BYTES, tmp_path / "store", 1)
    texts = texts.rename(tmp_path / "moved")
    os.utime(texts / "3.txt", (1, 1))
    add(texts, range(2))
    assert prepare(config(texts), BYTES, tmp_path / "store", 1).version == 2
    folder = tmp_path / "repositories"
    for name in "abc":
        (folder / name).mkdir(parents=True)
        (folder / name / "x.py").write_text(name)
    prepare(RepositoriesSource(folder=str(folder)), BYTES, tmp_path / "trees", 1)
    (folder / "d").mkdir()
    (folder / "d" / "x.py").write_text("d")
    store = prepare(RepositoriesSource(folder=str(folder)), BYTES, tmp_path / "trees", 1)
    assert store.version == 2 and {name for _, name in contents(store)} == set("abcd")
    (folder / "a" / "y.py").write_text("y")
    with pytest.raises(UserError, match="which have changed since"):
        prepare(RepositoriesSource(folder=str(folder)), BYTES, tmp_path / "trees", 1)


def write_records(path, *names):
    path.write_text("".join(json.dumps({"id": name, "text": f"text of {name}"}) + "\n" for name in names))


def test_records_that_are_added_keep_the_splits(tmp_path):
    """A document that was taken out of its split, because another was empty, never comes into two splits. Files that
    are named after splits don't change how the records before them were dealt."""
    folder, names = tmp_path / "records", [f"r{i}" for i in range(20)]
    folder.mkdir()
    source = JsonLinesSource(folder=str(folder), name_field="id", validation_share=1e-9, test_share=1e-9)
    write_records(folder / "data.jsonl", *names)
    old = prepare(source, BYTES, tmp_path / "store", 1)
    (held_out,) = old.split("test").names
    write_records(folder / "more.jsonl", "new", held_out)
    with pytest.raises(UserError, match=f"of train, validation, test are both named '{held_out}'"):
        prepare(source, BYTES, tmp_path / "store", 1)
    write_records(folder / "more.jsonl", "new", "r3")
    with pytest.raises(UserError, match="are both named 'r3'"):
        prepare(source, BYTES, tmp_path / "store", 1)
    write_records(folder / "more.jsonl", "new")
    new = prepare(source, BYTES, tmp_path / "store", 1)
    assert set(contents(new)) - set(contents(old)) == {("train", "new")}
    assert list(new.split("test").names) == [held_out]
    write_records(folder / "test.jsonl", "other")
    (folder / "data.jsonl").rename(folder / "train.jsonl")
    (folder / "more.jsonl").unlink()
    with pytest.raises(UserError, match="which have changed since"):
        prepare(source, BYTES, tmp_path / "store", 1)


def test_names_of_splits_that_come_later_are_refused(tmp_path):
    """Records of a file for training alone were dealt; the publisher's test file would be another rule."""
    folder = tmp_path / "records" / "data"
    folder.mkdir(parents=True)
    write_records(folder / "train-0.jsonl", *map(str, range(40)))
    source = JsonLinesSource(folder=str(folder.parent), name_field="id")
    prepare(source, BYTES, tmp_path / "store", 1)
    write_records(folder / "test-0.jsonl", "held out")
    with pytest.raises(UserError, match="which have changed since"):
        prepare(source, BYTES, tmp_path / "store", 1)


def test_a_store_that_was_killed_while_it_grew_is_whole(texts, tmp_path):
    old = prepare(config(texts), BYTES, tmp_path / "store", 1)
    add(texts, range(9))
    killed = "SplitWriter.close = lambda self: os.kill(os.getpid(), 9)"
    script = (
        "import os\n"
        "from meliad_like.sources.files import TextSource\n"
        "from meliad_like.data.preparation import *\n"
        "from meliad_like.vocabularies.base import BytesVocabularyConfig\n"
        f"{killed}\nprepare({config(texts)!r}, {BYTES!r}, {str(tmp_path / 'store')!r}, 1)"
    )
    assert forked.run("-c", script).returncode == -9
    assert (tmp_path / "store" / "version-2.incomplete").exists()
    assert contents(TokenStore(tmp_path / "store")) == contents(old)
    with pytest.raises(UserError, match="--part makes parts of a new token store alone: .* adds to .*store"):
        prepare_part(config(texts), BYTES, tmp_path / "store", 1, 2)
    assert prepare(config(texts), BYTES, tmp_path / "store", 1).totals("train").documents == 38
    assert not (tmp_path / "store" / "version-2.incomplete").exists()


def test_damage_of_a_version_is_named(texts, tmp_path):
    prepare(config(texts), BYTES, tmp_path / "store", 1)
    add(texts, range(2))
    prepare(config(texts), BYTES, tmp_path / "store", 1)
    tokens = tmp_path / "store" / "version-2" / "train" / "tokens.bin"
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with pytest.raises(UserError, match="version-2/train/tokens.bin has .* bytes and should have"):
        TokenStore(tmp_path / "store")
    (tmp_path / "store" / "version-2" / "files.json").write_text("[]")
    tokens.write_bytes(tokens.read_bytes() + b"\0\0")
    add(texts, range(3))
    with pytest.raises(UserError, match="files.json is not a JSON object"):
        prepare(config(texts), BYTES, tmp_path / "store", 1)


@pytest.mark.thorough
def test_few_documents_wait_in_memory(texts, tmp_path):
    source, started = open_source(config(texts)), []

    def references():
        for reference in source.references():
            started.append(reference)
            yield reference

    ByteVocabulary().save(tmp_path)
    results = encode_all(dataclasses.replace(source, shards=(references,)), tmp_path, 2, tmp_path)
    next(results)
    assert len(started) == 8
    # Ctrl-C is a signal to all processes, of which the first one alone ends the work.
    for process in multiprocessing.active_children():
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
    assert len(list(results)) == 29


@pytest.fixture
def records(tmp_path):
    """Two files of records, some of them bad."""
    folder = tmp_path / "records"
    folder.mkdir()
    lines = [json.dumps({"text": f"{i} " * (i % 7)}) + "\n" for i in range(40)]
    (folder / "a.jsonl").write_text("".join(lines[:9]))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("".join(lines[9:]).encode()))
    return JsonLinesSource(folder=str(folder), empty="skip", validation_share=1e-6)


@pytest.mark.parametrize("number", [1, 2, 3, 20])
def test_parts_are_joined_to_the_bytes_of_one_run(records, tmp_path, number):
    whole = prepare(records, BYTES, tmp_path / "whole", 1)
    assert len(whole.info.skipped) == 6 and whole.totals("validation").documents == 1
    for part in range(number, 0, -1):
        prepare_part(records, BYTES, tmp_path / "store", part, number, 1)
    prepare(records, BYTES, tmp_path / "store", 1)
    assert files(tmp_path / "store") == files(tmp_path / "whole")
    assert not (tmp_path / "store.parts").exists()


def test_parts_share_one_trained_vocabulary_and_splits(texts, tmp_path, monkeypatch, capsys):
    """Listed documents are in one part, and documents that the vocabulary changes in all."""
    vocabulary = DictionaryVocabularyConfig()
    prepare(config(texts), vocabulary, tmp_path / "whole", 1)
    prepare_part(config(texts), vocabulary, tmp_path / "store", 1, 3, 1)
    monkeypatch.setattr(preparation, "_make_vocabulary", None)
    for part in (2, 3, 1):
        prepare_part(config(texts), vocabulary, tmp_path / "store", part, 3, 1)
    assert "reusing part 1/3" in capsys.readouterr().err
    prepare(config(texts), vocabulary, tmp_path / "store", 1)
    assert files(tmp_path / "store") == files(tmp_path / "whole")
    prepare_part(config(texts), vocabulary, tmp_path / "store", 3, 3, 1)
    assert "reusing the token store" in capsys.readouterr().err


def test_missing_killed_and_damaged_parts(texts, tmp_path):
    store, parts = tmp_path / "store", tmp_path / "store.parts"
    for part in (1, 3):
        prepare_part(config(texts), BYTES, store, part, 4, 1)
    (parts / "3").rename(parts / "3.incomplete")
    with pytest.raises(UserError, match="3 of the 4 parts in .*store.parts are not there: make .*--part=2/4, 3/4, 4/4"):
        prepare(config(texts), BYTES, store, 1)
    for part in (2, 3, 4):
        prepare_part(config(texts), BYTES, store, part, 4, 1)
    tokens = parts / "4" / "train" / "tokens.bin"
    tokens.write_bytes(tokens.read_bytes()[:-1])
    with pytest.raises(UserError, match="store.parts/4/train is damaged: delete .*store.parts/4 and make it again"):
        prepare(config(texts), BYTES, store, 1)
    assert not store.exists()


def test_parts_of_other_settings_numbers_and_documents_are_refused(texts, tmp_path):
    store = tmp_path / "store"
    prepare_part(config(texts), BYTES, store, 1, 2, 1)
    with pytest.raises(UserError, match="parts is 2 there, 3 here; delete it, or choose another --store"):
        prepare_part(config(texts), BYTES, store, 1, 3, 1)
    with pytest.raises(UserError, match="store.parts belongs .*vocabulary.size_multiple is 1 there, 8 here"):
        prepare_part(config(texts), BytesVocabularyConfig(size_multiple=8), store, 2, 2, 1)
    with pytest.raises(UserError, match="source.empty is 'stop' there, 'skip' here"):
        prepare(config(texts, empty="skip"), BYTES, store, 1)
    with pytest.raises(UserError, match="--part=0/2 must be one of 1/2 to 2/2"):
        prepare_part(config(texts), BYTES, store, 0, 2, 1)
    (texts / "3.txt").write_text("changed")
    with pytest.raises(UserError, match="names, sizes and times of files is '.*' there"):
        prepare_part(config(texts), BYTES, store, 2, 2, 1)


def test_command_line(tmp_path):
    words = ["-m", "meliad_like.prepare", f"--store={tmp_path / 'a store'}", "--workers=1"]
    done = forked.run(*words, "--gin_param=RunConfig.source='books'")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "'books' is not one of huggingface, " in done.stderr
    done = forked.run(*words, "--part=/64")
    assert done.returncode == 2 and "--part=/64 must be two numbers, such as --part=3/64" in done.stderr
    for part in (["--part=1/1"], []):
        done = forked.run(*words, *part)
        assert done.returncode == 0, done.stderr
    assert list(TokenStore(tmp_path / "a store").split("test").names) == ["logging", "urllib"]


def test_files_that_are_not_read_are_counted(tmp_path, capsys):
    """A folder of Markdown and one text may have its only text in another split than training."""
    folder = tmp_path / "notes"
    folder.mkdir()
    for i in range(5):
        (folder / f"{i}.md").write_text("note")
    (folder / "one.txt").write_text("text")
    message = r"training: .*, 1 for test .*; 5 files were passed over"
    with pytest.raises(UserError, match=message):
        prepare(TextSource(folder=str(folder), test_share=0.9), BYTES, tmp_path / "store", 1, for_training=True)
    prepare(TextSource(folder=str(folder), test_share=0.0, validation_share=0.01), BYTES, tmp_path / "store", 1)
    warnings = capsys.readouterr().err
    assert "5 files were passed over (5 with .md)" in warnings
    assert "no document is for validation: raise SourceConfig.validation_share, or name" in warnings
    (folder / "one.txt").unlink()
    with pytest.raises(UserError, match="the text source has no documents in .*notes: 5 files were passed over"):
        prepare(TextSource(folder=str(folder)), BYTES, tmp_path / "another", 1)


def test_copies_of_training_documents_are_counted(tmp_path, capsys):
    """Long ones, token for token, in whichever version of the store."""
    folder, text = tmp_path / "documents", "the same text again\n" * 20
    folder.mkdir()
    for name, content in {"a": text, "b": "b" + text[1:], "c": text, "d": "short", "e": "short"}.items():
        (folder / f"{name}.txt").write_text(content)
    source = TextSource(folder=str(folder), validation_documents=("b", "d"), test_documents=("c",))
    prepare(source, BYTES, tmp_path / "store", 1)
    of_test = (
        "1 of 1 documents for test are copies of some for training, such as 'c' of 'a', and lower its loss: remove"
    )
    warnings = capsys.readouterr().err
    assert of_test in warnings and "for validation are copies" not in warnings
    (folder / "f.txt").write_text("b" + text[1:])
    prepare(source, BYTES, tmp_path / "store", 1)
    warnings = capsys.readouterr().err
    assert of_test in warnings and "1 of 2 documents for validation are copies of some for training, such" in warnings


@pytest.mark.thorough
def test_the_hint_of_a_missing_store_is_the_command_that_makes_it(texts, tmp_path):
    """Typed as it stands, in a folder with a space."""
    flags = ["--gin_file=size/tiny.gin", "--gin_param=RunConfig.source = 'text'"]
    flags += [
        f"--gin_param=FolderSourceConfig.folder = '{texts}'",
        f"--gin_param=ReaderConfig.store = '{tmp_path}/a b'",
    ]
    done = forked.run("-m", "meliad_like.train", f"--workdir={tmp_path / 'run'}", *flags)
    *_, hint = done.stderr.strip().partition(": make it with python ")
    done = forked.run(*shlex.split(hint))
    assert done.returncode == 0, done.stderr
    assert TokenStore(tmp_path / "a b").totals("train").documents > 20
