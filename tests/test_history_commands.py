"""The commands of ancient history on a tiny model: scores that resume after a stop, and evaluations."""

import json

import numpy as np
import pytest
from history_place import make_place
from tiny_run import run_command

from meliad_like.config import read_changes
from meliad_like.errors import UserError
from meliad_like.history import commands
from meliad_like.history.commands import HistoryRequest
from meliad_like.history.evaluation import read_strides
from meliad_like.history.selection import Ranking
from meliad_like.history.spans import candidates
from meliad_like.history.stride_store import StrideStore


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("history")
    make_place(folder)
    return folder


@pytest.fixture(scope="module")
def scores(place):
    commands.score(request(place, split="train"), place / "scores")
    return place / "scores"


def request(place, *gin_params, **changes):
    return HistoryRequest(str(place / "model"), changes=read_changes((), gin_params), batch_size=8, **changes)


def test_every_candidate_has_its_score(place, scores, capsys):
    store = StrideStore(scores)
    store.check_complete()
    # Of 90, 60 and 40 tokens; strides of 4 from the first on that has a span of 6 before 12 recent tokens.
    last = [index for index, stride in enumerate(store.strides) if stride.document == 2]
    assert [store.strides[index].end for index in last] == [20, 24, 28, 32, 36, 40]
    assert [len(store.numbers[index]) for index in last] == [1, 2, 4, 5, 6, 8]
    rows = dict(iter(store.rows().groupby(["document", "stride"])))
    for index in (0, 7, len(store.strides) - 1):
        stride = store.strides[index]
        of_stride = rows[stride.document, stride.number]
        assert of_stride["end"].tolist() == candidates(stride, store.info.config).tolist()
        assert of_stride["score"].tolist() == store.numbers[index]
    opened = request(place, split="train").open()
    assert store.info.maker == opened.fingerprint
    documents = store.documents(opened.store)
    assert list(documents.names) == ["0", "1", "2"]
    assert documents.tokens(1, 3, 9).tolist() == opened.documents.tokens(1, 3, 9).tolist()


def test_scoring_resumes_after_a_stop(place, scores, tmp_path, monkeypatch):
    whole = StrideStore(scores)
    asked = request(place, split="train")
    seen = []

    def interrupted(self, requests):
        for index, asked_for in enumerate(requests):
            if index == 5:
                raise KeyboardInterrupt
            seen.append(asked_for.stride)
            yield np.zeros(len(asked_for.ends), np.float32)

    with monkeypatch.context() as patch:
        patch.setattr(commands.Opened, "gains", lambda self: lambda requests: interrupted(self, requests))
        with pytest.raises(KeyboardInterrupt):
            commands.score(asked, tmp_path / "part")
    part = StrideStore(tmp_path / "part")
    assert seen == whole.strides[:5]
    with pytest.raises(UserError, match=f"{len(whole.numbers) - 5} of {len(whole.numbers)} strides have no scores yet"):
        part.check_complete()
    commands.score(asked, tmp_path / "part")
    done = StrideStore(tmp_path / "part")
    assert not any(map(any, done.numbers[:5])) and done.numbers[5:] == whole.numbers[5:]


def test_a_score_that_is_not_finite_is_named(scores, tmp_path):
    whole = StrideStore(scores)
    store = StrideStore(tmp_path / "store", whole.info)

    def make(strides):
        for index, _ in enumerate(strides):
            yield np.full(3, np.inf if index == 20 else 1, np.float32)

    stride = whole.strides[20]
    message = f"no finite scores to spans for the tokens {stride.first} to {stride.end - 1} of {stride.document} "
    with pytest.raises(UserError, match=message + rf"\(stride {stride.number}\): bind"):
        store.fill(make)
    assert len(StrideStore(tmp_path / "store").numbers) == 20


@pytest.mark.parametrize(
    ("bindings", "changes", "message"),
    [
        (["HistoryConfig.span_length = 4"], {}, "HistoryConfig.span_length is 6 there, 4 here"),
        ([], {"split": "test"}, "split is 'train' there, 'test' here"),
        ([], {"document_tokens": 50}, r"StoreInfo.lengths is \[90, 60, 40\] there, \[50, 50, 40\] here"),
        (
            ["PretrainedConfig.activation_dtype = 'bfloat16'"],
            {},
            "maker is '[0-9a-f]{64}' there, '[0-9a-f]{64}' here",
        ),
    ],
)
def test_scores_of_something_else_are_named(place, scores, bindings, changes, message):
    with pytest.raises(UserError, match=f"scores/numbers.jsonl belongs to another config: .*{message}"):
        commands.score(request(place, *bindings, **{"split": "train", **changes}), scores)


def test_what_does_not_change_scores_may_differ(place, scores):
    commands.score(request(place, "HistoryConfig.first_selection = 1", split="train"), scores)


def test_damaged_and_missing_stores_are_named(place, scores, tmp_path):
    with pytest.raises(UserError, match="scores or selections are missing at"):
        StrideStore(tmp_path)
    first, *_ = (scores / "numbers.jsonl").read_text().splitlines()
    (tmp_path / "numbers.jsonl").write_text(f"{first}\n[1.0, 2\n")
    with pytest.raises(UserError, match="numbers.jsonl:2 is not JSON"):
        StrideStore(tmp_path)
    with pytest.raises(UserError, match="no document of validation is long enough for a window of window_length=1024"):
        commands.score(
            request(
                place, "HistoryConfig.window_length = 1024", "HistoryConfig.history_length = 504", split="validation"
            ),
            tmp_path / "short",
        )


def test_evaluation(place, tmp_path):
    commands.evaluate(request(place), tmp_path, ["score_oracle", "recent"])
    saved = json.loads((tmp_path / "evaluation.json").read_text())
    assert [(row["name"], row["leaks_the_future"]) for row in saved["selections"]] == [
        ("baseline", False),
        ("random", False),
        ("recent", False),
        ("overlap_oracle", True),
        ("score_oracle", True),
    ]
    assert len({row["perplexity"] for row in saved["selections"]}) == 5
    assert [document["num_tokens"] for document in saved["documents"]] == [74, 19, 49]
    text = (tmp_path / "evaluation.md").read_text()
    assert "overlap_oracle (leaks the future)" in text
    assert "per token | per word | per byte" in text


def test_an_evaluation_resumes_after_a_stop(place, tmp_path):
    asked = request(place, "HistoryConfig.first_selection = 1")
    commands.evaluate(asked, tmp_path, [])
    whole = json.loads((tmp_path / "evaluation.json").read_text())
    made_of, *lines = (tmp_path / "documents.jsonl").read_text().splitlines()
    first = json.loads(lines[0])
    first["random"]["nats"] += 7
    # A stop in the middle of the third line.
    (tmp_path / "documents.jsonl").write_text("\n".join([made_of, json.dumps(first), lines[1], lines[2][:50]]))
    commands.evaluate(asked, tmp_path, [])
    again = json.loads((tmp_path / "evaluation.json").read_text())
    baseline, random, _ = ((a["nats"], b["nats"]) for a, b in zip(whole["selections"], again["selections"]))
    assert baseline[0] == baseline[1]
    # What is done is not done again.
    np.testing.assert_allclose(np.subtract(random[1], random[0]), [7, 0, 0], atol=1e-9)
    assert len((tmp_path / "documents.jsonl").read_text().splitlines()) == 4
    with pytest.raises(UserError, match="another config: config.first_selection is 1 there, None here; selections is"):
        commands.evaluate(request(place), tmp_path, ["recent"])


def test_parts_of_documents(place):
    opened = request(place, document_tokens=30).open()
    assert opened.documents.lengths.tolist() == [30, 20, 30]
    assert opened.documents.num_bytes.tolist() == [30, 19, 30]
    assert request(place, documents=("2",)).open().documents.lengths.tolist() == [50]
    few = request(place, max_tokens=60, document_tokens=30).open().documents
    assert few.lengths.sum() <= 60 and len(few.lengths) == 2
    with pytest.raises(UserError, match="there is no document 'x' in the split test of"):
        request(place, documents=("x", "1")).open()
    with pytest.raises(UserError, match="max_tokens=3 is less than the shortest document"):
        request(place, max_tokens=3).open()


def test_a_part_of_the_documents_is_read_as_all_of_them_are(place):
    chosen = []
    for changes in ({}, {"documents": ("2",)}, {"documents": ("2",), "document_tokens": 50}):
        opened = request(place, "HistoryConfig.first_selection = 1", **changes).open()
        index = opened.documents.names.index("2")
        readings = read_strides(
            lambda sequences: (np.zeros(sequence.num_targets) for sequence in sequences),
            opened.documents, [Ranking("random", opened.layout.config)], opened.layout, index,
        )  # fmt: skip
        of_document = [reading.spans["random"].tolist() for reading in readings if reading.spans]
        chosen.append(of_document)
    assert len(chosen[0]) > 5 and chosen[0] == chosen[1] == chosen[2]


def test_a_part_of_the_documents_is_selected_for_as_all_of_them_are(place, tmp_path):
    found = []
    for name, changes in (("all", {}), ("part", {"documents": ("2",)})):
        commands.select(request(place, **changes), tmp_path / name, ["random"])
        store = StrideStore(tmp_path / name)
        document = store.info.documents.index("2")
        found.append([numbers for s, numbers in zip(store.strides, store.numbers) if s.document == document])
    assert len(found[0]) > 1 and found[0] == found[1]


def run(*arguments):
    return run_command(["-m", "meliad_like.history", *arguments], num_devices=1)


def test_the_command_line(place, tmp_path):
    model = f"--checkpoint={place / 'model'}"
    done = run(
        "evaluate", model, f"--output={tmp_path}", "--document=1", "--gin_file=ancient_history/released_code.gin",
        "--gin_param=HistoryConfig.first_selection=1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    saved = json.loads((tmp_path / "evaluation.json").read_text())
    assert saved["config"]["baseline"] == "contiguous"
    # The released code counts the first token too.
    assert saved["documents"][0]["num_tokens"] == 20
