"""Studies of small checkpoints: their numbers, and pages that are safe and whole."""

import csv
import inspect
import json
from types import SimpleNamespace

import forked
import numpy as np
import pandas as pd
import pytest
from study_runs import DOCUMENTS, Page, assert_safe, make, one_device, runs

from meliad_like.config import with_changes
from meliad_like.errors import UserError
from meliad_like.models.model import Model
from meliad_like.studies import compare, context_curve, gates, memory_map, memory_use, protocols, readings
from meliad_like.studies.__main__ import COMMAND, STUDIES
from meliad_like.studies.interventions import cleared
from meliad_like.studies.readings import ModelLosses, StudyRequest, choose, open_studied, read
from meliad_like.vocabularies.base import ByteVocabulary

__all__ = ["one_device", "runs"]  # fixtures


@pytest.fixture(scope="module")
def compared(runs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    make(compare, runs("fixed_skip"), folder, {"other": (runs("slide_12l"),), "top": 12})
    return folder


def test_the_flags_of_a_study_are_what_it_reads():
    for study in (compare, context_curve, gates, memory_map, memory_use, protocols):
        parameters = inspect.signature(study.run).parameters
        own = STUDIES[study.__name__.rpartition(".")[2]]
        assert tuple(parameters) == ("request", *own)
    assert {*StudyRequest._fields, *(flag for own in STUDIES.values() for flag in own)} < set(COMMAND.flags)


def test_comparison_page(compared):
    assert_safe(compared)
    page = Page(compared)
    for words in (
        "fixed_skip<b> against slide_12l<b>",
        "test, 3 documents",
        "pattern",
        "Gomin",
        "alert('document')",
    ):
        assert words in page.text, words


def test_comparison_numbers(runs, compared):
    tokens = pd.read_csv(compared / "tokens.csv", keep_default_na=False)
    saved = json.loads((compared / "summary.json").read_text())
    studied = open_studied(runs("slide_12l"))
    reading = read(studied, choose([studied], StudyRequest(runs("slide_12l"))))
    expected = np.concatenate([np.append(0, nats) for nats in reading.losses]) / np.log(2)
    np.testing.assert_allclose(tokens["other_bits"], expected, rtol=1e-6)
    assert saved["models"][1]["bits per token"] == pytest.approx(reading.bits_per_token)
    gain = (tokens["other_bits"] - tokens["first_bits"]).sum()
    for groups in ("by_place", "by_category"):
        assert pd.read_csv(compared / f"{groups}.csv")["gain_bits"].sum() == pytest.approx(gain, abs=1e-6)
    sums = pd.read_csv(compared / "by_document.csv")
    assert sums["tokens"].sum() == len(tokens)
    top = list(csv.DictReader((compared / "top.csv").open(newline="")))
    # Words, not bytes: their gain is that of all their bytes.
    assert any(len(row["text"]) > 3 for row in top)
    for row in top:
        document = tokens[tokens["document"] == row["document"]]
        place = document[int(row["token"]) :][: len(row["text"].encode())]
        assert bytes(place["token"].tolist()).decode() == row["text"]
        gain = place["other_bits"].sum() - place["first_bits"].sum()
        assert float(row["gain"]) == pytest.approx(gain) and gain > 0 and row["category"] != "sign"


def test_protocols_side_by_side(runs, tmp_path):
    settings = {"protocol": ("segments", "sliding", "token_by_token"), "stride": 16, "windows": 4}
    make(protocols, runs("fixed_skip"), tmp_path, settings)
    segments, sliding, tokens = pd.read_csv(tmp_path / "protocols.csv").to_dict("records")
    assert sliding["protocol"] == "sliding, stride 16"
    # Of a byte vocabulary: all bytes, and the end of each document.
    number = sum(len(text.encode()) + 1 for text in DOCUMENTS.values())
    assert segments["tokens"] == sliding["tokens"] == tokens["tokens"] == number
    assert segments["bits per token"] == pytest.approx(tokens["bits per token"], rel=1e-5)
    assert sliding["FLOPs per token"] > segments["FLOPs per token"]
    with pytest.raises(UserError, match="have no effect without --protocol=sliding"):
        protocols.run(StudyRequest(runs("fixed_skip")), protocol=("segments",), stride=4)


@pytest.mark.thorough
def test_clearing_is_an_evaluation_with_cleared_states(runs, tmp_path):
    make(memory_use, runs("fixed_skip"), tmp_path, {"every": 32, "kind": ("shuffled", "cleared")})
    saved = json.loads((tmp_path / "summary.json").read_text())
    assert saved["parts"] == ["recurrent_states"] and saved["largest_difference_before_nats"] < 1e-5
    studied = open_studied(runs("fixed_skip"))
    chosen = choose([studied], StudyRequest(runs("fixed_skip")))
    segments = {"data.segment_length": 32, "data.tokens_per_step": 256}
    losses = []
    for model in (studied.run.model, cleared(studied.run.model)):
        run = with_changes(studied.run, segments | {"model": model})
        opened = studied.opened._replace(run=run, model=Model(model, studied.opened.vocabulary.size))
        losses.append(read(studied._replace(opened=opened), chosen).losses)
    gains = [(without - kept) / np.log(2) for kept, without in zip(*losses, strict=True)]
    since = np.concatenate([np.arange(32, gain.size) % 32 for gain in gains])
    gains = np.concatenate([gain[32:] for gain in gains])
    totals = pd.read_csv(tmp_path / "total.csv").set_index("kind")
    total = totals.loc["cleared"]
    assert total["tokens"] == gains.size and total["cost"] == pytest.approx(gains.mean(), abs=1e-6)
    assert np.isnan(total["low"])  # of three documents
    rows = [row for row in csv.DictReader((tmp_path / "use.csv").open(newline="")) if row["kind"] == "cleared"]
    assert [int(row["start"]) for row in rows] == [*range(32)]
    expected = np.bincount(since, gains) / np.bincount(since)
    np.testing.assert_allclose([float(row["cost"]) for row in rows], expected, atol=1e-5)
    of_shuffled, of_cleared, contrast = totals["cost"]
    assert contrast == pytest.approx(of_shuffled - of_cleared)
    assert_safe(tmp_path)
    page = Page(tmp_path)
    assert "test, 3 documents" in page.text and "another document's memory" in page.text.lower()


def test_intervals_of_costs_are_over_documents():
    counted, kept = [np.ones(9, bool)] * 5, [np.zeros(9)] * 5
    after = [np.log(2) * np.r_[np.zeros(3), np.full(6, bits)] for bits in (1, 1, 1, 1, 1)]
    rows = memory_use.costs(3, counted, {"kept": kept, "cleared": after}, np.array([0, 1, 3]))
    assert rows["tokens"].tolist() == [10, 20]
    for name in ("cost", "low", "high"):
        np.testing.assert_allclose(rows[name], [1, 1])
    after[0] = 3 * after[0]
    [row] = memory_use.costs(3, counted, {"kept": kept, "cleared": after}, np.array([0, 3])).to_dict("records")
    assert row["cost"] == pytest.approx(1.4) and row["low"] == pytest.approx(1) and row["high"] > 1.7


def test_targets_that_cost_no_loss_are_not_averaged():
    """Three of nine targets cost loss: one bit each, and three bits each after their memory is cleared."""
    counted = [np.arange(9) % 3 == 1]
    kept, cleared = ([counted[0] * np.log(2) * bits] for bits in (1, 3))
    rows = memory_use.costs(3, counted, {"kept": kept, "cleared": cleared}, np.array([0, 1, 2, 3]))
    assert rows[["start", "stop", "tokens", "bits", "cost"]].values.tolist() == [[1, 2, 2, 1, 2]]
    reading = ModelLosses(None, kept, counted)
    assert reading.num_targets == 3 and reading.bits_per_token == pytest.approx(1)
    curve = context_curve.by_position([reading], first_bin=1)
    assert curve.starts.tolist() == [1, 4, 7] and curve.local.tolist() == [[1, 1, 1]]


def test_curves_by_position():
    losses = np.log(2) * np.array([1, 2, 3, 4, 5, 6, 7, 8, 9], np.float32)
    counted = [np.ones(9, bool), np.ones(3, bool)]
    readings = [ModelLosses(None, [nats, nats[:3]], counted) for nats in (losses, 2 * losses)]
    result = context_curve.by_position(readings, first_bin=1)
    assert result.starts.tolist() == [*range(9)] and result.stops.tolist() == [*range(1, 10)]
    table = context_curve.curves(result, ["a", "b"])
    assert table["documents"].tolist() == [2, 2, 2, 1, 1, 1, 1, 1, 1]
    np.testing.assert_allclose(table["local: a"], range(1, 10), rtol=1e-6)
    expected = [1, 1.5, 2, 16 / 7, 21 / 8, 3, 3.4, 42 / 11, 4.25]
    np.testing.assert_allclose(table["cumulative: a"], expected, rtol=1e-6)
    # Too few documents for an interval.
    [(name, gains)] = result.gains(0, 1).items()
    assert name == "gain"
    np.testing.assert_allclose(gains, range(1, 10), rtol=1e-6)


def test_documents_that_agree_have_the_same_gain_however_they_are_drawn():
    losses = np.log(2) * np.array([1, 2, 3], np.float32)
    readings = [ModelLosses(None, [nats] * 5, [np.ones(3, bool)] * 5) for nats in (losses, 2 * losses)]
    gains = context_curve.by_position(readings, first_bin=1).gains(0, 1)
    np.testing.assert_allclose(list(gains.values()), [[1, 2, 3]] * 3, rtol=1e-6)


def test_context_curve_of_two_settings(runs, tmp_path):
    changes = ("DecoderConfig.clear_states = True",)
    make(context_curve, runs("fixed_skip"), tmp_path, gin_param=changes, document=("two",))
    rows = list(csv.DictReader((tmp_path / "curves.csv").open(newline="")))
    saved = json.loads((tmp_path / "summary.json").read_text())
    assert int(rows[-1]["stop"]) == len(DOCUMENTS["two"]) and {row["documents"] for row in rows} == {"1"}
    for model in saved["models"]:
        assert float(rows[-1][f"cumulative: {model['label']}"]) == pytest.approx(model["bits per token"])
    assert saved["models"][1]["label"] == "fixed_skip<b>, clear_states=True"
    assert_safe(tmp_path)
    assert "test, 1 of 3 documents" in Page(tmp_path).text
    sums = pd.read_csv(tmp_path / "sums.csv")
    assert sums["tokens"].sum() == len(DOCUMENTS["two"]) and len(sums) == len(rows)


def test_labels_of_folders_with_the_same_name_are_different(monkeypatch):
    def opened(folder, gin_params=(), step=None):
        label = ", ".join([folder.rpartition("/")[2], *gin_params])
        return readings.StudiedModel(label, folder, [*gin_params], SimpleNamespace(step=3))

    monkeypatch.setattr(readings, "open_studied", opened)
    models = readings.open_compared(StudyRequest("x/a", gin_param=("k=1",)), ("x/a", "y/a"), None)
    assert [model.label for model in models] == ["x/a, step 3", "x/a, step 3, k=1", "y/a, step 3, k=1"]


def test_missing_things_are_named(runs):
    first = runs("fixed_skip")
    with pytest.raises(UserError, match="compare needs one other model: --other=DIR, or --gin_param"):
        compare.run(StudyRequest(first))
    with pytest.raises(UserError, match="--document=none is not in test, which has 3: "):
        compare.run(StudyRequest(first, document=("none",)), other=(first,))
    with pytest.raises(UserError, match="--every=40 must be a multiple of the window, 16 tokens"):
        memory_use.run(StudyRequest(first), every=40)
    with pytest.raises(UserError, match="--every=1600: none of the documents is longer"):
        memory_use.run(StudyRequest(first), every=1600)
    with pytest.raises(UserError, match="--part=melodi: the model of .* carries window and recurrent_states"):
        memory_use.run(StudyRequest(first), part=("melodi",))
    with pytest.raises(UserError, match="--kind=shuffled needs two documents"):
        memory_use.run(StudyRequest(first, document=("two", "two")))
    with pytest.raises(
        UserError, match="what the model of .* remembers depends on where segments end: change Dec.*.clear_st"
    ):
        memory_use.run(StudyRequest(first, gin_param=("DecoderConfig.clear_states = True",)))
    with pytest.raises(
        UserError, match="memory_use: the model of .* remembers nothing beyond its window: --part=window"
    ):
        memory_use.run(StudyRequest(runs("slide_12l")))
    with pytest.raises(
        UserError, match="gates: the model of .*slide_12l.* has no states that pass from block to block"
    ):
        gates.run(StudyRequest(runs("slide_12l")))
    studied = open_studied(first)
    other = studied._replace(opened=studied.opened._replace(vocabulary=ByteVocabulary(64)))
    with pytest.raises(UserError, match=r"the vocabulary of the checkpoint .*fixed_skip<b> \(\w{12}\) is not that of"):
        choose([studied, other], StudyRequest(first))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["curve"],
            "must be compare or memory_use or context_curve or gates or memory_map or protocols, not 'curve'",
        ),
        (
            ["gates", "--other=x"],
            "--other has no effect on gates: it is for compare and context_curve",
        ),
        (["compare", "--gin_file=x"], "--gin_file has no effect here"),
        # Before the checkpoint is looked for.
        (["gates", f"--output={__file__}"], "test_studies.py is a file: name a folder"),
    ],
)
def test_the_command_line_is_checked(arguments, message):
    study, *others = arguments
    result = forked.run("-m", "meliad_like.studies", study, "--checkpoint=a", "--output=b", *others)
    assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr
