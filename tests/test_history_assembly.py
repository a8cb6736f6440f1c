"""Windows with spans, as literal lists."""

import numpy as np

from meliad_like.history.settings import HistoryConfig
from meliad_like.history.spans import Layout, strides

# A window of 12: two spans of 2 at every position, 8 recent tokens, 3 of them targets.
CONFIG = HistoryConfig(window_length=12, history_length=4, span_length=2, stride=3, separator="")
NONE = np.zeros(0, np.int64)


def window(length, number, ends, separator=None):
    """Token i of the document is 100 + i."""
    stride = list(strides(length, CONFIG))[number]
    made = Layout(CONFIG, separator).window(np.arange(100, 100 + length), stride, np.asarray(ends, np.int64))
    assert made.tokens.dtype == np.int32
    length = len(made.tokens)
    return made.tokens.tolist(), list(range(length - made.num_targets, length))


def test_a_documents_first_token_is_no_target():
    assert window(30, 0, NONE) == ([100, 101, 102], [1, 2])


def test_windows_grow_until_they_are_full():
    assert window(30, 2, NONE) == (list(range(100, 109)), [6, 7, 8])
    assert window(30, 4, NONE) == (list(range(103, 115)), [9, 10, 11])


def test_spans_in_the_place_of_the_oldest_tokens():
    # Stride 7 predicts tokens 21, 22 and 23; its window begins with token 12.
    plain = list(range(112, 124))
    assert window(30, 7, NONE) == (plain, [9, 10, 11])
    assert window(30, 7, [9, 4]) == ([107, 108, 102, 103, *plain[4:]], [9, 10, 11])
    assert window(30, 7, [9, 4], separator=5) == ([107, 5, 102, 5, *plain[4:]], [9, 10, 11])


def test_fewer_spans_leave_more_of_the_recent_text():
    assert window(30, 7, [9])[0] == [107, 108, *range(114, 124)]


def test_the_last_window_of_a_part_of_a_stride():
    # Two tokens are left of 26: the window is one shorter, and its recent text too.
    assert window(26, 8, [2, 3]) == ([100, 101, 101, 102, *range(119, 126)], [9, 10])
    # One token is left of 25.
    assert window(25, 8, [2, 3]) == ([100, 101, 101, 102, *range(119, 125)], [9])


def test_a_document_of_one_token_has_no_target():
    assert window(1, 0, NONE) == ([100], [])


def test_a_document_that_is_no_longer_than_the_window_is_as_it_is():
    for stride in strides(12, CONFIG):
        assert not stride.selects
        assert window(12, stride.number, NONE)[0] == list(range(100, 100 + stride.end))
