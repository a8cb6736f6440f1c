"""From scores to a trained selector, and its evaluation on other documents."""

import json

import forked
import jax
import pytest
from history_runs import BINDINGS, make_place

from meliad_like.config import read_changes
from meliad_like.errors import UserError
from meliad_like.history import commands
from meliad_like.history.commands import HistoryRequest
from meliad_like.history.stride_store import StrideStore
from meliad_like.mesh import make_mesh
from meliad_like.run import opening

LEAKING = "SelectorConfig.context = 'released_code'"


@pytest.fixture(scope="module", autouse=True)
def one_device():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opening, "make_mesh", lambda mesh: make_mesh(mesh, jax.devices()[:1]))
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A model, a token store, scores of the training documents, and a selector that leaks the future."""
    folder = make_place(tmp_path_factory.mktemp("history"))
    commands.score(asked(folder), folder / "scores")
    assert commands.train_selector(asked(folder, LEAKING), folder / "selector", str(folder / "scores")) == 0
    return folder


def asked(place, *more, split="train", **changes):
    return HistoryRequest(
        checkpoint=str(place / "model"),
        store=str(place / "store"),
        split=split,
        changes=read_changes((), (*BINDINGS, *more)),
        **changes,
    )


def test_what_a_selector_is_trained_on(place):
    saved = json.loads((place / "selector" / "selector.json").read_text())
    scores = StrideStore(place / "scores")
    assert saved["trained_on"]["num_pairs"] == len(scores.rows()) > 100
    assert saved["trained_on"]["scored_by"] == saved["trained_on"]["initialised_with"]
    assert saved["leaks_the_future"] is True
    info = json.loads((place / "scores" / "numbers.jsonl").read_text().splitlines()[0])
    expected = {name: value for name, value in info.items() if name.startswith("HistoryConfig.")}
    expected["SelectorConfig.context"] = "released_code"
    assert expected.items() <= saved["settings"].items()


def test_training_of_what_leaks_says_so(place):
    rows = [json.loads(line) for line in (place / "selector" / "metrics.jsonl").read_text().splitlines()]
    assert {row["kind"] for row in rows} == {"train (leaks the future)", "validation (leaks the future)"}


def test_it_is_evaluated_beside_the_others(place, tmp_path):
    request = asked(place, split="test")
    commands.evaluate(request, tmp_path, ["score_oracle"], [str(place / "selector")])
    found = json.loads((tmp_path / "evaluation.json").read_text())
    rows = {row["name"]: row for row in found["selections"]}
    assert list(rows) == [
        "baseline", "random", "overlap_oracle", "score_oracle", "learned_selector_released_code",
    ]  # fmt: skip
    learned = rows["learned_selector_released_code"]
    assert learned["leaks_the_future"] and learned["selection_flops"] > 0
    assert learned["selection_flops"] < rows["score_oracle"]["selection_flops"]
    assert "| learned_selector_released_code (leaks the future) |" in (tmp_path / "evaluation.md").read_text()


def test_what_can_not_be_trained_on_is_named(place, tmp_path):
    with pytest.raises(UserError, match="scores or selections are missing at .*none"):
        commands.train_selector(asked(place), tmp_path / "a", str(tmp_path / "none"))
    commands.select(asked(place), tmp_path / "chosen", ["recent"])
    with pytest.raises(UserError, match="chosen is a store of selections, and a selector is trained on scores"):
        commands.train_selector(asked(place), tmp_path / "a", str(tmp_path / "chosen"))
    assert not (tmp_path / "a").exists()


def test_settings_that_are_not_the_scores_are_named(place, tmp_path):
    message = "scores belongs to another config: span_length is 8 there, 4 here; leave it out"
    with pytest.raises(UserError, match=message):
        commands.train_selector(asked(place, "HistoryConfig.span_length = 4"), tmp_path, str(place / "scores"))


@pytest.mark.thorough
def test_scores_of_other_documents_are_another_training(place, tmp_path):
    for second in ("two", "three"):
        commands.score(asked(place, documents=("one", second), document_tokens=140), tmp_path / second)
    assert len({len(StrideStore(tmp_path / second).rows()) for second in ("two", "three")}) == 1
    assert commands.train_selector(asked(place), tmp_path / "selector", str(tmp_path / "two")) == 0
    with pytest.raises(UserError, match="trained_on.documents is '[0-9a-f]{64}' there, '[0-9a-f]{64}' here; choose"):
        commands.train_selector(asked(place), tmp_path / "selector", str(tmp_path / "three"))


def test_a_selector_of_another_vocabulary_is_an_error_that_names_both(place, tmp_path):
    other = make_place(tmp_path, size_multiple=64)
    with pytest.raises(
        UserError, match=r"vocabulary of the selector .*selector \(\w{12}\) is not that of .*store.* \(\w{12}\)"
    ):
        commands.evaluate(asked(other, split="test"), tmp_path / "out", [], [str(place / "selector")])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["select"], "select takes one --selection or one --selector, not 0"),
        (["train_selector"], "train_selector needs scores to learn from: give the folder that score made"),
        (["train_selector", "--split=test"], "--split has no effect on train_selector: it is for score"),
        (["score", "--selector=x"], "--selector has no effect on score: it is for evaluate and select"),
    ],
)
def test_the_command_line_is_checked(arguments, message):
    done = forked.run("-m", "meliad_like.history", *arguments, "--checkpoint=a", "--output=b")
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
