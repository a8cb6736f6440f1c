"""Spans and strides of ancient history, as literal numbers."""

import numpy as np
import pytest

from meliad_like.errors import UserError
from meliad_like.history.selection import SpanScorer, choose
from meliad_like.history.settings import HistoryConfig
from meliad_like.history.spans import Layout, candidates, is_scored, necessary_prefix, select, strides
from meliad_like.vocabularies.base import ByteVocabulary

# A window of 12: spans of 2 at every position fill up to 4, 8 are recent, 3 of them targets.
TINY = HistoryConfig(window_length=12, history_length=4, span_length=2, stride=3, separator="")


def places(length, config):
    return [(s.begin, s.first, s.end, s.recent_start, s.candidates_end, s.selects) for s in strides(length, config)]


def test_strides_of_a_document():
    assert places(26, TINY) == [
        (0, 0, 3, 0, 0, False),
        (0, 3, 6, 0, 0, False),
        (0, 6, 9, 0, 1, False),
        (0, 9, 12, 0, 4, False),
        (3, 12, 15, 7, 7, False),
        (6, 15, 18, 10, 10, False),
        (9, 18, 21, 13, 13, False),
        (12, 21, 24, 16, 16, True),
        # Two targets: the window is one shorter, and candidates end one earlier than its recent text begins.
        (15, 24, 26, 19, 18, True),
    ]


def test_the_papers_numbers():
    config = HistoryConfig()
    every = list(strides(2100, config))
    # Released code: from i = 1792 on.
    assert [s.first for s in every if s.selects] == [1792, 2048]
    assert candidates(every[7], config).tolist() == list(range(64, 1536, 32))
    assert every[7]._asdict() == {
        "document": 0,
        "number": 7,
        "begin": 1024,
        "first": 1792,
        "end": 2048,
        "recent_start": 1536,
        "candidates_end": 1536,
        "selects": True,
    }
    # 52 targets are left: 512 tokens before 2100 begin at 1588.
    assert (every[8].begin, every[8].recent_start, every[8].candidates_end) == (1280, 1792, 1588)
    # The released scores: 6 candidates for the first window, which ends at 768, and whole windows alone.
    scored = [stride for stride in strides(2100, config) if is_scored(stride, config)]
    assert [(s.end, len(candidates(s, config))) for s in scored][:2] == [(768, 6), (1024, 14)]
    assert scored[-1].end == 2048


def test_short_documents_have_no_selection():
    assert places(1, TINY) == [(0, 0, 1, 0, 0, False)]
    assert places(0, TINY) == []
    # Not even where it may begin at once: the window holds the whole document.
    at_once = HistoryConfig(window_length=12, history_length=4, span_length=2, stride=3, first_selection=1)
    assert [place[-1] for place in places(16, at_once)] == [False, False, False, False, True, True]


def test_a_part_of_the_candidates_is_a_function_of_seed_document_and_stride():
    def chosen(document=0, number=7, **changes):
        config = HistoryConfig(max_candidates=5, **changes)
        return candidates(list(strides(4000, config, document))[number], config).tolist()

    assert len(chosen()) == 5
    assert chosen() == sorted(chosen()) == chosen()
    assert set(chosen()) < set(range(64, 1536, 32))
    assert len({tuple(chosen()), tuple(chosen(seed=1)), tuple(chosen(document=1)), tuple(chosen(number=8))}) == 4


def test_the_best_span_comes_last():
    assert select(np.float32([1, 5, 9, 0, 7]), np.arange(4, 9), TINY).tolist() == [8, 6]


def test_of_equal_scores_the_later_span_is_better():
    assert select(np.float32([3, 1, 3, 3, 0]), np.arange(4, 9), TINY).tolist() == [6, 7]
    assert select(np.zeros(5, np.float32), np.arange(4, 9), TINY).tolist() == [7, 8]


def test_a_score_that_is_no_number_is_an_error():
    class Broken(SpanScorer):
        name, leaks_the_future = "broken", False

        def scores(self, document, stride, ends):
            return np.where(ends == 4, np.nan, 1).astype(np.float32)

    message = r"broken gives no finite scores to spans for the tokens 21 to 23 of a tale \(stride 7\): bind .*float32"
    with pytest.raises(UserError, match=message):
        choose(Broken(), "a tale", np.arange(26), list(strides(26, TINY))[7], TINY)


def test_the_separator_takes_the_last_place():
    document = np.arange(100, 120)
    assert Layout(TINY, None).span_tokens(document, np.int64([7, 2])).tolist() == [[105, 106], [100, 101]]
    assert Layout(TINY, 5).span_tokens(document, np.int64([7, 2])).tolist() == [[105, 5], [100, 5]]
    assert document.tolist() == list(range(100, 120))


def test_the_necessary_prefix():
    prefixes = [necessary_prefix(np.arange(26), stride, TINY).tolist() for stride in strides(26, TINY)]
    assert prefixes[:3] == [[], [0, 1, 2], [1, 2, 3, 4, 5]]
    assert prefixes[-1] == [19, 20, 21, 22, 23]


def test_the_separators_token():
    vocabulary = ByteVocabulary()
    assert Layout.of(HistoryConfig(separator="\n"), vocabulary).separator == 10
    assert Layout.of(HistoryConfig(separator=""), vocabulary).separator is None
    with pytest.raises(UserError, match=r"separator='\\n\\n' is 2 tokens of this vocabulary"):
        Layout.of(HistoryConfig(), vocabulary)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"span_length": 60}, "history_length=512 must be a multiple of span_length=60"),
        ({"history_length": 832}, "history_length=832 and stride=256 must fit together into window_length=1024"),
    ],
)
def test_what_does_not_fit(changes, message):
    with pytest.raises(UserError, match=message):
        HistoryConfig(**changes)
