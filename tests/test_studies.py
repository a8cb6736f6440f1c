"""Studies of small checkpoints: their numbers, and pages that are safe and whole."""

import base64
import csv
import gzip
import json

import forked
import numpy as np
import pytest
from study_runs import DOCUMENTS, Page, assert_safe, one_device, request, runs

from meliad_like.data.vocabulary import ByteVocabulary
from meliad_like.errors import UserError
from meliad_like.studies import clear_state, compare, context_curve, gates
from meliad_like.studies.readings import choose, open_subject, read

__all__ = ["one_device", "runs"]  # fixtures


@pytest.fixture(scope="module")
def compared(runs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    compare.run(request(runs("fixed_skip"), folder, other=(runs("slide_12l"),)))
    return folder


def test_comparison_page(compared):
    page = Page(compared)
    assert_safe(page)
    for words in (
        "fixed_skip<b> against slide_12l<b>",
        "test, 3 documents",
        "mechanisms",
        "Gomin",
        "alert('document')",
    ):
        assert words in page.text, words


def test_comparison_numbers(runs, compared):
    numbers = np.load(compared / "tokens.npz")
    assert numbers["lengths"].sum() == len(numbers["tokens"]) == len(numbers["first_bits"])
    saved = json.loads((compared / "summary.json").read_text())
    subject = open_subject(runs("slide_12l"))
    reading = read(subject, choose([subject], request(runs("slide_12l"), "")))
    expected = np.concatenate([np.append(0, nats) for nats in reading.losses]) / np.log(2)
    np.testing.assert_allclose(numbers["other_bits"], expected, rtol=1e-6)
    assert saved["other"]["bits per token"] == pytest.approx(reading.bits_per_token)
    gain = (numbers["other_bits"] - numbers["first_bits"]).sum()
    for groups in ("by_place", "by_category"):
        assert sum(group["gain_bits"] for group in saved[groups]) == pytest.approx(gain, abs=1e-6)
    top = list(csv.DictReader((compared / "top.csv").open(newline="")))
    # Words, not bytes: their bits are those of all their bytes.
    assert any(len(row["text"]) > 3 for row in top)
    for row in top:
        start = int(row["token"]) + sum(numbers["lengths"][: list(numbers["names"]).index(row["document"])])
        place = np.s_[start : start + len(row["text"].encode())]
        assert bytes(numbers["tokens"][place].tolist()).decode() == row["text"]
        assert float(row["other_bits"]) == pytest.approx(numbers["other_bits"][place].sum())
        assert float(row["gain"]) > 0 and row["category"] != "sign"


def test_the_text_of_a_page_is_the_document(compared):
    [packed] = [text for _, attributes, text in Page(compared).scripts if attributes.get("id") == "document-0"]
    content = gzip.decompress(base64.b64decode(packed))
    units, size = np.frombuffer(content[:8], "<u4")
    tokens, sizes, first, other = np.frombuffer(content[8 : 8 + 8 * units], "<u2").reshape(4, units).astype(int)
    numbers = np.load(compared / "tokens.npz")
    name = str(numbers["names"][0])
    assert content[8 + 8 * units :].decode() == DOCUMENTS[name] and size == sizes.sum()
    assert tokens.sum() == numbers["lengths"][0]
    for bits, column in ((first, "first_bits"), (other, "other_bits")):
        assert bits.sum() / 100 == pytest.approx(numbers[column][: numbers["lengths"][0]].sum(), abs=0.005 * units)


def test_cleared_and_kept_differ_from_the_second_segment_on(runs, tmp_path):
    clear_state.run(request(runs("fixed_skip"), tmp_path, clear_every=32))
    saved = json.loads((tmp_path / "summary.json").read_text())
    assert saved["largest_difference_in_the_first_segment_nats"] == 0
    assert saved["other"]["segment"] == 32 and saved["other"]["label"] == "states cleared every 32 tokens"
    numbers = np.load(tmp_path / "tokens.npz")
    starts = np.cumsum(numbers["lengths"]) - numbers["lengths"]
    for start, length in zip(starts, numbers["lengths"], strict=True):
        # Token 33 is the first whose prediction follows a cleared state.
        gains = (numbers["other_bits"] - numbers["first_bits"])[start : start + length]
        assert not gains[:33].any() and np.count_nonzero(gains[33:]) > 0.9 * (length - 33)
    assert_safe(Page(tmp_path))


def test_curves_by_position():
    losses = np.log(2) * np.array([1, 2, 3, 4, 5, 6, 7, 8, 9], np.float32)
    result = context_curve.curves([[losses, losses[:3]], [2 * losses, 2 * losses[:3]]], first_bin=1)
    assert result.edges.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert result.num_documents.tolist() == [2, 2, 2, 1, 1, 1, 1, 1, 1]
    np.testing.assert_allclose(result.local[0], range(1, 10), rtol=1e-6)
    np.testing.assert_allclose(result.cumulative[0], [1, 1.5, 2, 16 / 7, 21 / 8, 3, 3.4, 42 / 11, 4.25], rtol=1e-6)
    np.testing.assert_allclose(result.gains(1), range(1, 10), rtol=1e-6)
    low, high = result.interval(1)
    # Two documents that agree: however they are drawn, the gain is the same.
    np.testing.assert_allclose([low, high], [result.gains(1)] * 2, rtol=1e-6)


def test_context_curve_of_two_settings(runs, tmp_path):
    context_curve.run(
        request(runs("fixed_skip"), tmp_path, gin_param=("RecurrentStates.clear_states = True",), document=("two",))
    )
    rows = list(csv.DictReader((tmp_path / "curves.csv").open(newline="")))
    saved = json.loads((tmp_path / "summary.json").read_text())
    assert int(rows[-1]["stop"]) == len(DOCUMENTS["two"]) and {row["documents"] for row in rows} == {"1"}
    for model in saved["models"]:
        assert float(rows[-1][f"cumulative: {model['label']}"]) == pytest.approx(model["bits per token"])
    assert saved["models"][1]["label"] == "fixed_skip<b>, clear_states=True"
    page = Page(tmp_path)
    assert_safe(page)
    assert "test, 1 of 3 documents" in page.text


def test_missing_things_are_named(runs, tmp_path):
    first = runs("fixed_skip")
    with pytest.raises(UserError, match="compare needs one other model: --other=DIR, or --gin_param"):
        compare.run(request(first, tmp_path))
    with pytest.raises(UserError, match="--document=none is not in test, which has 3: "):
        compare.run(request(first, tmp_path, other=(first,), document=("none",)))
    with pytest.raises(UserError, match="--clear_every=40 must be a multiple of the window, 16 tokens"):
        clear_state.run(request(first, tmp_path, clear_every=40))
    with pytest.raises(UserError, match="--clear_every=1600: none of the documents is longer"):
        clear_state.run(request(first, tmp_path, clear_every=1600))
    with pytest.raises(UserError, match="clear_state: the model of .*slide_12l.* has no states to clear"):
        clear_state.run(request(runs("slide_12l"), tmp_path))
    with pytest.raises(
        UserError, match="gates: the model of .*slide_12l.* has no states that pass from block to block"
    ):
        gates.run(request(runs("slide_12l"), tmp_path))
    subject = open_subject(first)
    other = subject._replace(opened=subject.opened._replace(vocabulary=ByteVocabulary(64)))
    with pytest.raises(UserError, match=r"the vocabulary of the checkpoint .*fixed_skip<b> \(\w{12}\) is not that of"):
        choose([subject, other], request(first, tmp_path))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["curve"],
            "the first argument must be compare or clear_state or context_curve or gates or continuations or "
            "memory_map, not 'curve'",
        ),
        (
            ["gates", "--other=x"],
            "--other has no effect on gates: it is for compare and context_curve and continuations",
        ),
        (["compare", "--gin_file=x"], "--gin_file has no effect here"),
        # Before the checkpoint is looked for.
        (["gates", f"--output={__file__}"], f"{__file__}: File exists; name another path"),
    ],
)
def test_the_command_line_is_checked(arguments, message):
    study, *others = arguments
    result = forked.run("-m", "meliad_like.studies", study, "--checkpoint=a", "--output=b", *others)
    assert result.returncode == 2 and message in result.stderr and "Traceback" not in result.stderr
