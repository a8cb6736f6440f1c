import dataclasses
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from meliad_like.data.preparation import prepare
from meliad_like.data.split import count_words
from meliad_like.data.split_writer import SplitWriter
from meliad_like.data.token_store import TokenStore, token_dtype
from meliad_like.errors import UserError
from meliad_like.sources.files import StandardLibrarySource, TextSource
from meliad_like.vocabularies.base import BytesVocabularyConfig, ByteVocabulary

TEXTS = {"a": "one two\n", "b": "é three", "held": "four"}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for name, text in TEXTS.items():
        (folder / f"{name}.txt").write_text(text)
    return TextSource(folder=str(folder), test_documents=("held",))


@pytest.fixture
def store(source, tmp_path):
    return prepare(source, BytesVocabularyConfig(), tmp_path / "store", num_workers=1)


def test_documents_of_a_split(store):
    train = store.split("train")
    assert list(train.names) == ["a", "b"]
    assert train.lengths.tolist() == [9, 9]
    assert train.num_bytes.tolist() == [8, 8]
    assert train.num_words.tolist() == [2, 2]
    assert train.tokens(1, 0, 9).tolist() == [*"é three".encode(), 256]
    assert train.tokens(0, 4, 7).tolist() == list(b"two")
    assert train.tokens(0, 0, 1).dtype == np.int32


def test_totals(store):
    assert dataclasses.astuple(store.totals("test"))[:4] == (1, 5, 4, 1)
    assert store.totals("validation").documents == 0


@pytest.mark.parametrize("document, start, stop", [(2, 0, 1), (-1, 0, 1), (0, 0, 10), (0, -1, 2), (0, 3, 2)])
def test_tokens_outside_a_document(store, document, start, stop):
    with pytest.raises(IndexError):
        store.split("train").tokens(document, start, stop)


@pytest.mark.parametrize("name, problem", [("valid", "is unknown"), ("validation", "has no documents")])
def test_missing_split(store, name, problem):
    with pytest.raises(UserError, match=f"split '{name}' {problem} in .*: choose one of train, test, or prepare"):
        store.split(name)


def test_names_that_utf_8_cannot_hold(store, tmp_path):
    writer = SplitWriter(tmp_path / "split", ByteVocabulary())
    names = ["", "two\nlines", "\ud800", "é"]
    for name in names:
        writer.write(name, np.zeros(1, np.int32), 1, 1)
    totals = writer.close()
    shutil.rmtree(store.folder / "test")
    (tmp_path / "split").rename(store.folder / "test")
    store.info.splits["test"] = store.infos[0].splits["test"] = totals
    assert list(store.split("test").names) == names
    assert store.split("test").names[1:3] == names[1:3]


def test_truncated_tokens(store):
    path = store.folder / "train" / "tokens.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(UserError, match=r"train/tokens.bin has 34 bytes and should have 36"):
        TokenStore(store.folder)


@pytest.mark.parametrize("name", ["documents.npy", "names.txt"])
def test_damaged_table_of_documents(store, name):
    path = store.folder / "train" / name
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match=r"train/documents.npy or names.txt is damaged or missing: prepare the store"):
        store.split("train")
    path.unlink()
    with pytest.raises(UserError, match=r"train/documents.npy or names.txt is damaged or missing: prepare the store"):
        store.split("train")


@pytest.mark.parametrize("token", [257, 65535])
def test_a_token_out_of_range_is_named(store, token):
    tokens = np.fromfile(store.folder / "train" / "tokens.bin", np.uint16)
    tokens[9 + 4] = token
    tokens.tofile(store.folder / "train" / "tokens.bin")
    train = TokenStore(store.folder).split("train")
    assert train.tokens(1, 5, 9).tolist() == [*"é three".encode()[5:], 256]
    message = f"token {token} at position 4 of document b is not in the vocabulary of 257: prepare the store"
    with pytest.raises(UserError, match=message):
        train.tokens(1, 2, 9)


def test_missing_store(tmp_path):
    with pytest.raises(UserError, match=r"no token store at .*nothing: make it with python -m meliad_like.prepare"):
        TokenStore(tmp_path / "nothing")


def test_other_format_version(store):
    path = store.folder / "store.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 0}))
    with pytest.raises(UserError, match="has format version 0, not 5"):
        TokenStore(store.folder)


def test_vocabulary_of_another_store(store):
    store.check_vocabulary(ByteVocabulary().fingerprint, "the checkpoint")
    other = ByteVocabulary(size_multiple=64).fingerprint
    ours = store.vocabulary.fingerprint
    with pytest.raises(UserError, match=rf"vocabulary of the checkpoint \({other[:12]}\) .* \({ours[:12]}\)"):
        store.check_vocabulary(other, "the checkpoint")


@pytest.mark.parametrize("part", ["source", "vocabulary"])
def test_settings_of_another_store(store, source, part):
    settings = {"source": source, "vocabulary": BytesVocabularyConfig()}
    store.check_settings(**settings)
    settings[part] = {"source": StandardLibrarySource(), "vocabulary": BytesVocabularyConfig(size_multiple=2)}[part]
    with pytest.raises(UserError, match=f"made by other {part} settings.*another ReaderConfig.store"):
        store.check_settings(**settings)


def test_a_store_of_another_share_names_the_field_and_both_values(store, source):
    other = dataclasses.replace(source, validation_share=0.2)
    with pytest.raises(UserError, match="settings than this run's: source.validation_share is 0.05 there, 0.2 here; "):
        store.check_settings(other, BytesVocabularyConfig())


def test_documents_of_another_folder(store, source, tmp_path):
    def check(folder):
        store.check_settings(dataclasses.replace(source, folder=str(folder)), BytesVocabularyConfig())

    with pytest.raises(UserError, match="made from the documents in .*, and FolderSourceConfig.folder = '/elsewhere'"):
        check("/elsewhere")
    shutil.copytree(source.folder, tmp_path / "moved")
    check(tmp_path / "moved")
    (tmp_path / "moved" / "a.txt").write_text("One two\n")
    with pytest.raises(
        UserError, match="and those in .*moved are others: .*, or prepare another store .--store, Reader"
    ):
        check(tmp_path / "moved")
    check("")
    shutil.move(source.folder, tmp_path / "away")
    check(source.folder)
    shutil.move(tmp_path / "away", source.folder)
    time = (Path(source.folder) / "a.txt").stat().st_mtime
    os.utime(Path(source.folder) / "a.txt", (time, time + 9))
    check(source.folder)
    (Path(source.folder) / "a.txt").write_text("One two\n")
    with pytest.raises(UserError, match="which have changed since"):
        check(source.folder)
    (Path(source.folder) / "a.txt").write_text(TEXTS["a"])


def test_token_type_holds_every_id():
    assert [token_dtype(size) for size in (257, 65_536, 65_537)] == ["<u2", "<u2", "<u4"]


def test_words_are_runs_without_whitespace():
    assert count_words(" To be,\n\nor not\tto-be:  'tis ") == 6
    # Also where a text is counted in pieces, in a word, behind it and before it.
    for text in ("word " * 40_000, "x" * 65_535 + " y", "x" * 65_536 + "\u2003y", "x" * 200_000, " " * 70_000):
        assert count_words(text) == len(text.split())
