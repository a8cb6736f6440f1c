"""Stores of scores and selections: which documents they are of, and what happens to a damaged one."""

import dataclasses
import json

import pytest

from meliad_like import config
from meliad_like.data.preparation import prepare
from meliad_like.errors import UserError
from meliad_like.history.commands import HistoryRequest
from meliad_like.history.config import make_selection
from meliad_like.history.selection import Ranking, choose
from meliad_like.history.settings import HistoryConfig
from meliad_like.history.spans import strides
from meliad_like.history.stride_store import StoreInfo, StrideStore

HISTORY = HistoryConfig(window_length=24, history_length=12, span_length=6, stride=4, separator="\n")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Three documents."""
    folder = tmp_path_factory.mktemp("names")
    documents = [("Poems", "a" * 80), ("Ballads", "b" * 50), ("Odes", "c" * 60)]
    lines = [json.dumps({"title": title, "text": text}) + "\n" for title, text in documents]
    (folder / "train.jsonl").write_text("".join(lines))
    run = config.parse(
        [],
        [
            "RunConfig.source = 'jsonl'",
            "JsonLinesSource.name_field = 'title'",
            f"FolderSourceConfig.folder = '{folder}'",
            f"ReaderConfig.store = '{folder / 'store'}'",
        ],
    )
    return prepare(run.source, run.vocabulary, run.data.store, num_workers=1)


def made(store, what="scores", documents=()):
    chosen = HistoryRequest("", split="train", documents=documents).choose_documents(store)
    return StoreInfo.of(chosen, store, "train", what=what, config=HISTORY, maker="somebody")


def test_each_document_is_read_as_itself(store, tmp_path):
    documents = StrideStore(tmp_path, made(store)).documents(store)
    again = StrideStore(tmp_path).documents(store)
    for found in (documents, again):
        assert list(found.names) == ["Poems", "Ballads", "Odes"]
        assert [set(found.tokens(i, 0, 40).tolist()) for i in range(3)] == [{97}, {98}, {99}]
        assert found.lengths.tolist() == [81, 51, 61]


def test_a_selection_from_a_file_is_that_of_the_document_itself(store, tmp_path):
    split = store.split("train")
    selections = StrideStore(tmp_path / "train", made(store, "selections"))

    def chosen(document, stride):
        return choose(Ranking("recent", HISTORY), "", document, stride, HISTORY)

    def tokens(document):
        return split.tokens(document, 0, int(split.lengths[document]))

    selections.fill(lambda strides: (chosen(tokens(stride.document), stride) for stride in strides))
    choose_again, leaks = make_selection(HISTORY, "file", str(tmp_path), store, "train")
    assert not leaks
    compared = 0
    for document, length in enumerate(split.lengths.tolist()):
        for stride in strides(length, HISTORY, document):
            if stride.selects:
                found = choose_again(split.names[document], tokens(document), stride)
                assert found.tolist() == chosen(tokens(document), stride).tolist()
                compared += 1
    assert compared == len(selections.numbers) > 10


def test_other_documents_are_named(store, tmp_path):
    info = made(store)
    StrideStore(tmp_path, info)
    for name, value in {"documents": ("Poems", "Ballads", "Elegies"), "indices": (0, 1, 3)}.items():
        with pytest.raises(UserError, match=rf"StoreInfo.{name} is \[.+\] there, \[.+\] here"):
            StrideStore(tmp_path, dataclasses.replace(info, **{name: value}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:50] + "\n", "numbers.jsonl:1 is not JSON: "),
        (lambda text: text[:50], "scores or selections are missing at"),
        (
            lambda text: text.replace("HistoryConfig.stride", "HistoryConfig.step"),
            "numbers.jsonl is damaged, or of .*: .*HistoryConfig has no parameter step",
        ),
    ],
)
def test_a_damaged_store_is_named(store, tmp_path, damage, message):
    StrideStore(tmp_path, made(store))
    path = tmp_path / "numbers.jsonl"
    before = path.read_text()
    path.write_text(damage(before))
    assert path.read_text() != before
    with pytest.raises(UserError, match=message) as caught:
        StrideStore(tmp_path)
    assert "\n" not in str(caught.value)
