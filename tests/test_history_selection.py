"""Rankings of spans: the inputs that they depend on, and those that they must not depend on."""

import dataclasses

import numpy as np
import pytest

from meliad_like.history.gains import SpanGains
from meliad_like.history.selection import Ranking, choose, overlap
from meliad_like.history.selectors.scorer import LearnedSelector
from meliad_like.history.settings import HistoryConfig
from meliad_like.history.spans import candidates, select, strides

CONFIG = HistoryConfig(window_length=20, history_length=8, span_length=4, stride=4, separator="")
DOCUMENT = np.random.default_rng(0).integers(0, 9, size=80)
STRIDE = list(strides(80, CONFIG))[15]
ENDS = candidates(STRIDE, CONFIG)
HONEST = tuple(Ranking(name, CONFIG) for name in ("random", "recent", "prefix_overlap"))


@pytest.mark.parametrize("selection", HONEST, ids=lambda selection: selection.name)
def test_what_is_to_be_predicted_changes_no_selection(selection):
    assert not selection.leaks_the_future
    other = np.where(np.arange(80) < STRIDE.first, DOCUMENT, 8 - DOCUMENT)
    before, after = (selection.scores(document, STRIDE, ENDS) for document in (DOCUMENT, other))
    assert before.dtype == np.float32
    np.testing.assert_array_equal(before, after)


def test_the_overlap_oracle_reads_what_is_to_be_predicted_and_says_so():
    oracle = Ranking("overlap_oracle", CONFIG)
    other = DOCUMENT.copy()
    other[STRIDE.first : STRIDE.end] = DOCUMENT[:4]
    assert oracle.leaks_the_future
    assert select(oracle.scores(other, STRIDE, ENDS), ENDS, CONFIG)[-1] == 4
    assert (oracle.scores(other, STRIDE, ENDS) != oracle.scores(DOCUMENT, STRIDE, ENDS)).any()


def test_recent_spans_are_the_last_ones():
    assert select(Ranking("recent", CONFIG).scores(DOCUMENT, STRIDE, ENDS), ENDS, CONFIG).tolist() == ENDS[-2:].tolist()


def test_only_rankings_that_run_a_model_choose_among_random_candidates():
    config = dataclasses.replace(CONFIG, max_candidates=3)
    ranked = []

    class Recording(Ranking):
        def scores(self, document, stride, ends):
            ranked.append(ends.tolist())
            return super().scores(document, stride, ends)

    class Model(Recording):
        runs_a_model = True

    for name in ("random", "recent", "prefix_overlap", "overlap_oracle"):
        choose(Recording(name, config), "", DOCUMENT, STRIDE, config)
        assert ranked.pop() == ENDS.tolist()
    assert SpanGains.runs_a_model and LearnedSelector.runs_a_model
    choose(Model("recent", config), "", DOCUMENT, STRIDE, config)
    assert ranked.pop() == candidates(STRIDE, config).tolist()
    assert len(candidates(STRIDE, config)) == 3 < len(ENDS)


def test_random_spans_are_a_function_of_seed_document_and_stride():
    def scores(seed=0, document=0, number=15):
        selection = Ranking("random", HistoryConfig(seed=seed))
        stride = STRIDE._replace(document=document, number=number)
        return tuple(selection.scores(DOCUMENT, stride, ENDS).tolist())

    assert scores() == scores()
    assert len({scores(), scores(seed=1), scores(document=1), scores(number=14)}) == 4
    # Every span is as likely as any other to come first.
    first = [np.argmax(scores(document=i)) for i in range(400)]
    assert np.bincount(first, minlength=len(ENDS)).min() > 0


@pytest.mark.parametrize(
    ("measure", "expected"), [("multiset", [3, 1, 0]), ("set", [2, 1, 0]), ("jaccard", [2 / 4, 1 / 6, 0])]
)
def test_overlap(measure, expected):
    document = np.array([1, 1, 2, 5, 1, 6, 7, 8, 9, 9, 9, 9])
    ends = np.array([4, 8, 12])
    config = HistoryConfig(window_length=20, history_length=8, span_length=4, stride=4, separator="", overlap=measure)
    shared = overlap(document, ends, np.array([2, 1, 1, 3]), config)
    np.testing.assert_allclose(shared, expected, rtol=1e-6)


def test_the_token_under_a_separator_is_no_part_of_a_span():
    config = HistoryConfig(window_length=20, history_length=8, span_length=4, stride=4, separator="\n")
    document = np.array([4, 5, 6, 1, 1, 5, 6, 7])
    assert overlap(document, np.array([4, 8]), np.array([1]), config).tolist() == [0, 1]


def test_nothing_overlaps_with_nothing():
    assert overlap(DOCUMENT, ENDS, np.zeros(0, np.int64), CONFIG).tolist() == [0] * len(ENDS)
