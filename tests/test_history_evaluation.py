"""Evaluation of documents with and without spans against a plain loop over windows."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pandas as pd
import pytest
from fake_split import FakeSplit

from meliad_like.families.pretrained.config import PretrainedConfig
from meliad_like.history import evaluation as report
from meliad_like.history.evaluation import BASELINE, SUMS, Evaluation, evaluate
from meliad_like.history.evaluation import read_strides as read_document
from meliad_like.history.gains import SpanGains, TargetLosses
from meliad_like.history.selection import Ranking
from meliad_like.history.settings import HistoryConfig
from meliad_like.history.spans import Layout, Window
from meliad_like.mesh import MeshConfig, make_mesh
from meliad_like.models.model import Model

CONFIG = HistoryConfig(window_length=20, history_length=8, span_length=4, stride=4, separator="\n", first_selection=1)
SEPARATOR = 3
LAYOUT = Layout(CONFIG, SEPARATOR)
MODEL = Model(
    PretrainedConfig(
        num_layers=1, model_width=8, num_heads=2, num_key_value_heads=2, head_size=4, feedforward_width=8,
        max_positions=20, window_length=20,
    ),
    40,
)  # fmt: skip


class Documents(FakeSplit):
    def __init__(self, lengths):
        super().__init__(lengths)
        chance = np.random.default_rng(0)
        self.num_bytes = 3 * self.lengths
        self.num_words = self.lengths // 2
        self.all_tokens = [chance.integers(0, 40, size=length).astype(np.int32) for length in lengths]

    def tokens(self, document, start, stop):
        return self.all_tokens[document][start:stop]


DOCUMENTS = Documents([61, 1, 20, 46])


@pytest.fixture(scope="module")
def model():
    # Larger than a fresh model's, so that what it reads makes a difference.
    params = jax.tree.map(lambda x: 4 * x, MODEL.init(jax.random.key(2)))
    return params, make_mesh(MeshConfig(data=1), jax.devices()[:1])


@pytest.fixture(scope="module")
def windows(model):
    return TargetLosses(MODEL, *model, length=20, max_targets=4, batch_size=8)


def gains_of(model, config=CONFIG):
    return SpanGains(functools.partial(TargetLosses, MODEL, *model, batch_size=8), Layout(config, SEPARATOR))


@pytest.fixture(scope="module")
def evaluation(model, windows):
    return evaluate(windows, DOCUMENTS, [Ranking("random", CONFIG), gains_of(model)], LAYOUT)


def read_strides(windows, documents, *arguments):
    """The strides of all documents."""
    for index in range(len(documents.lengths)):
        yield from read_document(windows, documents, *arguments, index)


def plain_loop(windows, tokens, rank=None):
    """Sums of losses, window by window, as section 3.1 of the paper and the order of its released code have it."""
    total = 0.0
    for i in range(0, len(tokens), 4):
        begin, end = max(i + 4 - 20, 0), min(i + 4, len(tokens))
        ids = tokens[begin:end].copy()
        spans = [tokens[e - 4 : e] for e in range(4, end - 12, 2)]
        if rank is not None and begin >= 1 and spans:
            best = sorted(range(len(spans)), key=lambda index: (rank(i, index), index))[-2:]
            for place, index in enumerate(best):
                ids[4 * place : 4 * place + 4] = [*spans[index][:3], SEPARATOR]
        targets = end - i - (i == 0)
        if targets:
            total += sum(next(windows([Window(ids, targets)])).tolist())
    return total


def test_the_baseline_is_a_sliding_window(windows, evaluation):
    expected = [plain_loop(windows, tokens) for tokens in DOCUMENTS.all_tokens]
    np.testing.assert_allclose(evaluation.of(BASELINE)["nats"], expected, rtol=1e-6)
    assert evaluation.of("random")["num_tokens"].tolist() == [60, 0, 19, 45]


def test_selections_fill_the_same_windows(windows):
    found = evaluate(windows, DOCUMENTS, [Ranking("recent", CONFIG)], LAYOUT)
    expected = [plain_loop(windows, tokens, rank=lambda i, index: index) for tokens in DOCUMENTS.all_tokens]
    np.testing.assert_allclose(found.of("recent")["nats"], expected, rtol=1e-6)


def test_the_most_recent_spans_are_among_all_candidates():
    config = dataclasses.replace(CONFIG, max_candidates=3)
    readings = read_strides(no_losses, DOCUMENTS, [Ranking("recent", CONFIG)], Layout(config, SEPARATOR))
    chosen = {reading.stride: reading.spans["recent"].tolist() for reading in readings if reading.spans}
    assert len(chosen) > 10
    for stride, ends in chosen.items():
        last = (stride.candidates_end - 1) // 2 * 2
        assert ends == [end for end in (last - 2, last) if end >= 4]


def no_losses(sequences):
    return (np.zeros(sequence.num_targets) for sequence in sequences)


def test_the_score_oracle_is_better_than_chance_on_average(model, windows, evaluation):
    found = evaluate(windows, Documents([100] * 6), [Ranking("random", CONFIG), gains_of(model)], LAYOUT)
    sums = found.sums["nats"].groupby(level=0).sum()
    assert sums["score_oracle"] < sums["random"] - 10
    assert sums["score_oracle"] < sums[BASELINE] - 10
    assert evaluation.selections == {BASELINE: False, "random": False, "score_oracle": True}


def test_of_single_spans_the_score_oracle_takes_the_best(model, windows):
    """A window with one span is what equation 2 reads: no choice is better for any stride."""
    config = dataclasses.replace(CONFIG, history_length=4)
    gains = gains_of(model, config)
    selections = [gains, Ranking("random", config), Ranking("recent", CONFIG)]
    better, num_targets = [], set()
    for reading in read_strides(windows, DOCUMENTS, selections, Layout(config, SEPARATOR)):
        if reading.stride.selects:
            nats = {name: float(losses.sum()) for name, losses in reading.nats.items()}
            assert nats["score_oracle"] <= min(nats["random"], nats["recent"]) + 1e-4
            better.append(nats["random"] - nats["score_oracle"])
            num_targets.add(reading.stride.num_targets)
    assert len(better) > 10 and np.mean(better) > 0.1
    assert num_targets == {1, 2, 4}


def test_only_windows_that_select_differ(windows, evaluation):
    # Of document 2 one window reaches back to its beginning, and so all of it does.
    assert evaluation.of(BASELINE)["num_tokens_where_selected"].tolist() == [41, 0, 0, 26]
    for name in ("random", "score_oracle"):
        gains = evaluation.of(name) - evaluation.of(BASELINE)
        different, where = gains["nats"], gains["nats_where_selected"]
        np.testing.assert_allclose(different, where, atol=1e-6)
        assert different[2] == 0 and abs(different[0]) > 1e-3
    for reading in read_strides(windows, DOCUMENTS, [Ranking("random", CONFIG)], LAYOUT):
        assert bool(reading.spans) == reading.stride.selects


def test_the_released_codes_first_token(windows, evaluation):
    config = dataclasses.replace(CONFIG, first_token="released_code")
    released = evaluate(windows, DOCUMENTS, [], Layout(config, SEPARATOR))
    first = [next(windows([Window(tokens[:4], 3)])).mean() for tokens in DOCUMENTS.all_tokens if len(tokens) > 1]
    # A document of one token has nothing to take the mean of.
    assert released.of(BASELINE)["num_tokens"].tolist() == [61, 0, 20, 46]
    np.testing.assert_allclose(
        (released.of(BASELINE) - evaluation.of(BASELINE))["nats"], [first[0], 0, *first[1:]], rtol=1e-4
    )


def test_costs(evaluation):
    costs = report.figures(evaluation).to_dict("index")
    layer = 4 * 2 * 8 * 8 + 2 * 2 * 20 * 8 + 2 * 2 * 8 * 8
    # 16, 1, 5 and 12 strides; 124 tokens are predicted.
    assert costs[BASELINE]["model_flops"] == 34 * (20 * layer + 4 * 2 * 8 * 40) / 124
    assert costs["random"]["model_flops"] == costs[BASELINE]["model_flops"]
    assert costs["random"]["selection_flops"] == 0 < costs["score_oracle"]["selection_flops"]


def of_nats(*nats_by_selection, tokens=(100, 200, 300)):
    names = (BASELINE, "score_oracle", "random")[: len(nats_by_selection)]
    frames = {
        name: pd.DataFrame(
            [
                (count, where, nats, nats / 2, 30.0, 2.0)
                for count, where, nats in zip(tokens, (50, 0, 100), nats_by_document)
            ],
            columns=SUMS,
        )
        for name, nats_by_document in zip(names, nats_by_selection)
    }
    sizes = {"num_words": np.array(tokens) // 2, "num_bytes": 4 * np.array(tokens)}
    return Evaluation(
        config=CONFIG,
        documents=pd.DataFrame({"name": ["a", "b", "c"], **sizes}),
        sums=pd.concat(frames),
        selections={name: name == "score_oracle" for name in names},
    )


def test_figures():
    evaluation = of_nats([300.0, 500.0, 1000.0], [270.0, 450.0, 900.0], [330.0, 550.0, 1100.0])
    found = report.figures(evaluation)
    oracle = found.loc["score_oracle"]
    assert oracle["perplexity"] == pytest.approx(math.exp(1620 / 600))
    assert oracle["word_perplexity"] == pytest.approx(math.exp(1620 / 300))
    assert oracle["byte_perplexity"] == pytest.approx(math.exp(1620 / 2400))
    assert oracle["change"] == pytest.approx(math.exp(-180 / 600) - 1)
    assert oracle["perplexity_where_selected"] == pytest.approx(math.exp(810 / 150))
    assert oracle["share_of_oracle"] == 1 and found["share_of_oracle"]["random"] == -1
    for name in found.filter(like="_low"):
        figure = name.removesuffix("_low")
        assert oracle[name] <= oracle[figure] <= oracle[f"{figure}_high"]


def test_of_a_loss_there_is_no_share():
    # The score oracle is worse than the baseline, and random spans even more so.
    evaluation = of_nats([300.0, 500.0, 1000.0], [330.0, 520.0, 1010.0], [340.0, 550.0, 1100.0])
    assert report.figures(evaluation)["share_of_oracle"].isna().all()
    assert [row[-1] for row in report.tables(report.to_dict(evaluation))[1].rows] == ["-", "-", "-"]


def test_intervals_over_documents():
    # Of two documents a half of the draws has both, a quarter each only one.
    _, low, high = report.ratio(np.array([1.0, 9.0]), np.array([1, 1]))
    assert (low, high) == (1, 9)
    # Documents that are alike leave no doubt, however long they are.
    assert report.ratio(np.array([2.0, 4.0, 10.0]), np.array([1, 2, 5])).tolist() == [2, 2, 2]
    assert all(math.isnan(x) for x in report.ratio(np.array([1.0]), np.array([1]))[1:])
    # Nor do documents without a part of it tell of others than the one that has all.
    assert all(math.isnan(x) for x in report.ratio(np.array([0.0, 5.0, 0.0]), np.array([0, 10, 0]))[1:])
    # The normal approximation of a mean's interval.
    values = np.random.default_rng(0).normal(size=400)
    _, low, high = report.ratio(values, np.ones(400))
    assert (high - low) / 2 == pytest.approx(1.96 * values.std() / 20, rel=0.1)


def test_differences_are_paired():
    # Documents differ more than selections do.
    evaluation = of_nats([100.0, 500.0, 1500.0], [99.0, 498.0, 1497.0], [99.0, 498.0, 1497.0])
    figures = report.figures(evaluation).loc["random"]
    assert figures["change_high"] < 0
    assert figures["perplexity_high"] > figures["perplexity"] * 1.2


def test_tables_and_json():
    evaluation = of_nats([300.0, 500.0, 1000.0], [270.0, 450.0, 900.0], [330.0, 550.0, 1100.0])
    text = "".join(table.to_markdown() for table in report.tables(report.to_dict(evaluation)))
    assert "| score_oracle (leaks the future) | 14.88 (" in text
    assert "| random | 27.11 (" in text
    saved = report.to_dict(evaluation)
    assert [row["leaks_the_future"] for row in saved["selections"]] == [False, True, False]
    assert saved["config"]["window_length"] == 20
    # A share of no gain at all is not a number.
    assert report.to_dict(of_nats([3.0, 5.0, 9.0], [3.0, 5.0, 9.0]))["selections"][1]["share_of_oracle"] is None
