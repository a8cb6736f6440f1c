"""Stores of scores and selections: which documents they are of, and what happens to a damaged one."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from meliad_like import config
from meliad_like.data.preparation import prepare
from meliad_like.data.readers import ReaderConfig
from meliad_like.errors import UserError
from meliad_like.history import commands
from meliad_like.history.opening import Request, choose
from meliad_like.history.reader import make_selection
from meliad_like.history.selection import RecentSpans
from meliad_like.history.spans import HistoryConfig, rank, select, strides
from meliad_like.history.stride_store import StrideStore

HISTORY = HistoryConfig(window_length=24, history_length=12, span_length=6, stride=4, separator="\n")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Three documents, two of which have the same name."""
    folder = tmp_path_factory.mktemp("names")
    documents = [("Poems", "a" * 80), ("Ballads", "b" * 50), ("Poems", "c" * 60)]
    lines = [json.dumps({"title": title, "text": text}) + "\n" for title, text in documents]
    (folder / "train.jsonl").write_text("".join(lines))
    run = config.parse(
        [],
        [
            "SourceConfig.kind = 'jsonl'",
            "SourceConfig.name_field = 'title'",
            f"SourceConfig.folder = '{folder}'",
            f"ReaderConfig.store = '{folder / 'store'}'",
        ],
    )
    return prepare(run.source, run.vocabulary, run.data.store, num_workers=1)


def info_of(store, what="scores", **asked):
    request = Request("", split="train", **asked)
    opened = SimpleNamespace(config=HISTORY, store=store, documents=choose(store, request))
    return commands._info(opened, request, what=what, maker="somebody")


def test_of_documents_with_the_same_name_each_is_read_as_itself(store, tmp_path):
    documents = StrideStore(tmp_path, info_of(store)).documents(store)
    again = StrideStore(tmp_path).documents(store)
    for found in (documents, again):
        assert found.names == ["Poems", "Ballads", "Poems"]
        assert [set(found.tokens(i, 0, 40).tolist()) for i in range(3)] == [{97}, {98}, {99}]
        assert found.lengths.tolist() == [81, 51, 61]


def test_a_selection_from_a_file_is_that_of_the_document_itself(store, tmp_path):
    split = store.split("train")
    selections = StrideStore(tmp_path / "train", info_of(store, "selections"))

    def chosen(document, stride):
        return select(*reversed(rank(RecentSpans(), "", document, stride, HISTORY)), HISTORY)

    def tokens(document):
        return split.tokens(document, 0, int(split.lengths[document]))

    selections.fill(lambda strides: (chosen(tokens(stride.document), stride) for stride in strides))
    choose_again = make_selection(ReaderConfig(selection="file", selections=str(tmp_path)), HISTORY, store, "train")
    compared = 0
    for document, length in enumerate(split.lengths.tolist()):
        for stride in strides(length, HISTORY, document):
            if stride.selects:
                found = choose_again(split.names[document], tokens(document), stride)
                assert found.tolist() == chosen(tokens(document), stride).tolist()
                compared += 1
    assert compared == len(selections.strides) > 10


def test_earlier_stores_know_documents_by_name_alone(store, tmp_path):
    for name, documents in (("all", ()), ("one", ("Ballads",))):
        StrideStore(tmp_path / name, dataclasses.replace(info_of(store, documents=documents), indices=()))
    one = StrideStore(tmp_path / "one").documents(store)
    assert set(one.tokens(0, 0, 40).tolist()) == {98}
    with pytest.raises(UserError, match="2 documents are called 'Poems', and the scores in .*all don't say of which"):
        StrideStore(tmp_path / "all").documents(store)


def test_other_documents_are_named(store, tmp_path):
    made = info_of(store)
    StrideStore(tmp_path, made)
    other = dataclasses.replace(made, documents=("Poems", "Ballads", "Odes"))
    with pytest.raises(UserError, match="is of another documents: 'Poems' there, 'Odes' here; choose another folder"):
        StrideStore(tmp_path, other)
    with pytest.raises(UserError, match="is of another indices: 2 there, 3 here"):
        StrideStore(tmp_path, dataclasses.replace(made, indices=(0, 1, 3)))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:50], "store.json is not JSON: "),
        (lambda text: "[]", "store.json is damaged: it holds a list"),
        (lambda text: text.replace('"lengths"', '"length"'), "store.json is damaged, or of another version, .* length"),
        (lambda text: text.replace('"stride": 4', '"stride": "4"'), "store.json: stride='4' must be int"),
        (lambda text: text.replace('"stride"', '"step"'), "store.json is damaged, or of another version, .* in step"),
        (lambda text: text.replace('"what": "scores"', '"what": "score"'), "what='score' must be 'scores' or"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "has format version 2, this program reads 1"),
    ],
)
def test_a_damaged_store_is_named(store, tmp_path, damage, message):
    StrideStore(tmp_path, info_of(store))
    path = tmp_path / "store.json"
    before = path.read_text()
    path.write_text(damage(before))
    assert path.read_text() != before
    with pytest.raises(UserError, match=message) as caught:
        StrideStore(tmp_path)
    assert "\n" not in str(caught.value)
