"""The schedule against tables written by hand, and its invariants for random lengths."""

import hashlib
from concurrent.futures import ThreadPoolExecutor
from random import Random

import numpy as np
import pytest

from meliad_like.data.schedule import Run, Schedule
from meliad_like.errors import UserError

RANDOM_BLOCKS = np.random.default_rng(1).integers(0, 9, size=50)


def table(schedule: Schedule, num_blocks: int) -> list[str]:
    """A string for each lane, a letter for each block: the document's; '.' where the lane is idle."""
    rows = []
    for lane in range(schedule.num_lanes):
        row = ["."] * num_blocks
        for run in schedule.runs(lane, 0, num_blocks):
            row[run.block : run.block + run.num_blocks] = "abcdefgh"[run.document] * run.num_blocks
        rows.append("".join(row))
    return rows


def test_the_longest_document_goes_to_the_lane_that_is_free_first():
    schedule = Schedule(np.array([1, 4, 2, 3, 2]), 3, 0, shuffle=False, epochs=1)
    assert table(schedule, 5) == ["bbbb.", "ddda.", "ccee."]
    assert schedule.num_steps(1) == 4


def test_of_lanes_that_are_free_at_once_the_lowest_comes_first():
    assert table(Schedule(np.array([2, 2, 1, 1]), 2, 0, shuffle=False, epochs=1), 4) == ["aac.", "bbd."]


def test_more_lanes_than_documents():
    assert table(Schedule(np.array([1, 2]), 4, 0, shuffle=False, epochs=1), 2) == ["bb", "a.", "..", ".."]


def test_the_next_epoch_follows_without_a_gap():
    schedule = Schedule(np.array([2, 3, 1]), 2, 0, shuffle=False)
    assert table(schedule, 8) == ["bbbbbbbb", "aacaacaa"]
    assert schedule.num_steps(1) is None
    assert schedule.runs(1, 4, 3) == [Run(4, 1, 0, 1), Run(5, 1, 2, 0), Run(6, 1, 0, 0)]


def test_documents_without_blocks_are_never_dealt():
    assert table(Schedule(np.array([0, 2, 0, 1]), 1, 0, shuffle=False), 6) == ["bbdbbd"]


def test_shuffled_order_is_the_one_that_earlier_runs_had():
    """Resuming needs an order that never changes with the version of numpy."""
    assert table(Schedule(np.ones(8, int), 1, 0), 16) == ["dcbgahef" + "hefbgcad"]
    assert table(Schedule(np.ones(8, int), 1, 7), 8) == ["gdeachfb"]


@pytest.mark.parametrize("num_lanes", [1, 3, 64])
@pytest.mark.parametrize("shuffle", [True, False])
def test_every_block_is_read_once_in_each_of_two_epochs(num_lanes, shuffle):
    schedule = Schedule(RANDOM_BLOCKS, num_lanes, 5, shuffle=shuffle, epochs=2)
    end = schedule.num_steps(1)
    assert end is not None
    seen = np.zeros((50, 9), int)
    for lane in range(num_lanes):
        for block in range(end + 3):
            for run in schedule.runs(lane, block, 1):
                assert run.block == block
                seen[run.document, run.offset] += 1
    np.testing.assert_array_equal(seen, 2 * (np.arange(9) < RANDOM_BLOCKS[:, None]))


def test_the_answer_does_not_depend_on_who_asks_first():
    questions = [(lane, first, 10) for lane in range(4) for first in range(0, 400, 7)]
    in_order, backwards, together = (Schedule(RANDOM_BLOCKS, 4, 3) for _ in range(3))
    expected = [in_order.runs(*question) for question in questions]
    assert [backwards.runs(*question) for question in reversed(questions)] == expected[::-1]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda question: together.runs(*question), questions)) == expected


def test_no_document_with_a_target_is_an_error():
    with pytest.raises(UserError, match="no document has a token to predict"):
        Schedule(np.array([0, 0]), 2, 0)


def test_the_order_is_the_one_that_earlier_runs_had():
    """A resumed run reads on where it stopped, so that the order of documents must never change."""
    digest = hashlib.sha256()
    # Python promises the same random numbers in all versions.
    random = Random(0)
    for _ in range(300):
        num_documents, num_lanes = int(2 ** (8 * random.random())), int(2 ** (6 * random.random()))
        longest = random.choice([1, 2, 7, 300])
        blocks = [int(random.random() * (longest + 1)) for _ in range(num_documents)] + [1]
        shuffle, epochs = random.random() < 0.7, random.choice([1, 2, 5, None])
        schedule = Schedule(np.array(blocks), num_lanes, int(random.random() * 1e6), shuffle=shuffle, epochs=epochs)
        first, count = int(random.random() * 200), 1 + int(random.random() * 100)
        for lane in range(num_lanes):
            digest.update(repr([tuple(run) for run in schedule.runs(lane, first, count)]).encode())
        digest.update(repr(schedule.num_steps(1)).encode())
    assert digest.hexdigest() == "e85adb4e0e9fa68bcf1ccd0840a82b7bf8d6b5e27edd40fd11e38638389ed7b2"
