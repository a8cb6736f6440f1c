"""The windows reader: exactly the tokens of the paper's section 4.2."""

import numpy as np
import pytest
from fake_split import STRIDE, FakeSplit

from meliad_like.data.readers import LanesReader
from meliad_like.errors import UserError


def make(lengths, num_lanes=1, windows=3, w=10, **changes):
    split = FakeSplit(lengths)
    settings = {"overlap": 3, "shuffle": False, "epochs": 1, **changes}
    return LanesReader(split, num_lanes, windows * w, w, **settings)


def windows(reader):
    """The windows of all lanes and steps as (start, document, inputs, targets that count), without idle windows."""
    found = []
    for step in range(reader.num_steps):
        batch = reader.batch(step, range(reader.num_lanes))
        for lane, i in np.ndindex(batch.document.shape):
            own = np.s_[lane, i * reader.window_length : (i + 1) * reader.window_length]
            if batch.document[lane, i] >= 0:
                targets = batch.targets[own][batch.loss_mask[own]].tolist()
                inputs = batch.inputs[own]
                assert batch.position[lane, i] == inputs[0] % STRIDE
                found.append((bool(batch.start[lane, i]), int(batch.document[lane, i]), inputs.tolist(), targets))
            else:
                assert not batch.loss_mask[own].any()
    return found


def test_the_papers_example():
    # Windows of 10 that overlap by 3: t1:10, t8:17, t15:24, which predict t2:11, t12:18, t19:25. We count from 0.
    read = windows(make([25]))
    assert [(start, inputs) for start, _, inputs, _ in read] == [
        (True, list(range(10))),
        (False, list(range(7, 17))),
        (False, list(range(14, 24))),
    ]
    assert [targets for *_, targets in read] == [list(range(1, 11)), list(range(11, 18)), list(range(18, 25))]


@pytest.mark.parametrize("overlap", range(10))
@pytest.mark.parametrize("separate", [False, True])
def test_every_token_after_the_first_is_predicted_once(overlap, separate):
    lengths = [2, 9, 10, 11, 12, 18, 31, 64, 1]
    read = windows(make(lengths, num_lanes=2, overlap=overlap, separate=separate))
    found = sorted(target for *_, targets in read for target in targets)
    assert found == [STRIDE * d + i for d, length in enumerate(lengths) for i in range(1, length)]
    for start, _, inputs, targets in read:
        assert targets
        if not start:
            # The first new token sees the repeated ones and the one before it.
            assert inputs.index(targets[0] - 1) == overlap


def test_a_window_at_a_time_is_the_whole_document():
    read = windows(make([30], overlap=9))
    assert [targets for *_, targets in read[1:]] == [[i] for i in range(11, 30)]


def test_separate_sequences():
    read = windows(make([100], separate=True))
    # Three windows: 10 + 2 * 7 targets, and then anew from the next token.
    assert [start for start, *_ in read[:6]] == [True, False, False, True, False, False]
    assert [inputs[0] for _, _, inputs, _ in read[:6]] == [0, 7, 14, 24, 31, 38]
    assert read[3][3][0] == 25


def test_a_segment_of_its_own_begins_with_every_step():
    reader = make([100, 7, 40], num_lanes=2, separate=True)
    for step in range(reader.num_steps):
        batch = reader.batch(step, [0, 1])
        used = batch.document[:, 0] >= 0
        assert batch.start[used, 0].all()
        assert not batch.start[:, 1:].any()


def test_documents_follow_each_other_within_a_segment():
    read = windows(make([30, 20, 15]))
    assert [(start, document) for start, document, *_ in read] == [
        (True, 0), (False, 0), (False, 0), (False, 0), (True, 1), (False, 1), (False, 1), (True, 2), (False, 2)
    ]  # fmt: skip


def test_whole_segments_begin_with_documents():
    lengths = [30, 9, 70]
    reader = make(lengths, whole_segments=True)
    begins = [reader.batch(step, [0]).start[0] for step in range(reader.num_steps)]
    assert not any(start[1:].any() for start in begins) and sum(start[0] for start in begins) == len(lengths)
    assert [targets for *_, targets in windows(reader)] == [targets for *_, targets in windows(make(lengths))]


def test_lanes_are_made_separately_and_orders_depend_on_the_seed():
    reader = make([90, 50, 70, 20], num_lanes=3, shuffle=True, epochs=None, seed=1)
    whole = reader.batch(4, [0, 1, 2])
    for name, values in reader.batch(4, [2, 0])._asdict().items():
        np.testing.assert_array_equal(values, getattr(whole, name)[[2, 0]])
    other = make([90, 50, 70, 20], num_lanes=3, shuffle=True, epochs=None, seed=2)
    assert any((other.batch(i, [0]).inputs != reader.batch(i, [0]).inputs).any() for i in range(5))


def test_padding_share():
    # 24 targets in three windows of ten.
    assert make([25]).padding_share == pytest.approx(1 - 24 / 30)
    # Two sequences of three windows for 30 targets.
    assert make([31], separate=True).padding_share == pytest.approx(1 - 30 / 60)


def test_what_does_not_fit():
    with pytest.raises(UserError, match="overlap=10 must be at least 0 and below window_length=10"):
        make([20], overlap=10)
    with pytest.raises(UserError, match="no document has a token to predict"):
        make([1])
