"""Batches of the lanes reader: literal ones, and invariants for any lengths."""

import dataclasses
import hashlib
from random import Random

import numpy as np
import pytest
from fake_split import STRIDE, FakeSplit

from meliad_like.data.readers import LanesReader, ReaderConfig
from meliad_like.errors import UserError

RANDOM_LENGTHS = np.random.default_rng(0).integers(1, 60, size=40)


def reader_of(lengths, num_lanes=4, segment_length=16, window_length=4, **arguments):
    return LanesReader(FakeSplit(lengths), num_lanes, segment_length, window_length, **arguments)


def evaluation_reader(lengths, num_lanes=4, **arguments):
    return reader_of(lengths, num_lanes, shuffle=False, epochs=1, **arguments)


def assert_batches_equal(left, right):
    for name, one, other in zip(left._fields, left, right, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=name)


def test_several_documents_in_one_segment():
    batch = evaluation_reader([4, 7], num_lanes=2, segment_length=12).batch(0, [0])
    second = evaluation_reader([4, 7], num_lanes=1, segment_length=12).batch(0, [0])
    assert batch.inputs.tolist() == [[1000, 1001, 1002, 1003, 1004, 1005, 0, 0, 0, 0, 0, 0]]
    assert second.inputs.tolist() == [[1000, 1001, 1002, 1003, 1004, 1005, 0, 0, 0, 1, 2, 0]]
    assert second.targets.tolist() == [[1001, 1002, 1003, 1004, 1005, 1006, 0, 0, 1, 2, 3, 0]]
    assert second.loss_mask.astype(int).tolist() == [[1, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 0]]
    assert second.start.tolist() == [[True, False, True]]
    assert second.document.tolist() == [[1, 1, 0]]
    assert second.position.tolist() == [[0, 4, 0]]


def test_a_document_continues_in_the_next_segment():
    batch = evaluation_reader([22], num_lanes=2, segment_length=8).batch(1, range(2))
    assert batch.inputs.tolist() == [list(range(8, 16)), [0] * 8]
    assert batch.targets.tolist() == [list(range(9, 17)), [0] * 8]
    assert batch.start.tolist() == [[False, False], [False, False]]
    assert batch.document.tolist() == [[0, 0], [-1, -1]]
    assert batch.position.tolist() == [[8, 12], [0, 0]]
    assert batch.loss_mask.tolist() == [[True] * 8, [False] * 8]


@pytest.mark.parametrize("length, blocks", [(2, 1), (5, 1), (6, 2), (9, 2)])
def test_the_last_token_is_a_target_and_never_an_input(length, blocks):
    batch = evaluation_reader([length], num_lanes=1).batch(0, [0])
    assert batch.targets[batch.loss_mask].tolist() == list(range(1, length))
    assert (batch.document == 0).sum() == blocks


@pytest.mark.parametrize("num_lanes", [1, 3, 8, 64])
def test_evaluation_covers_every_target_exactly_once(num_lanes):
    reader = evaluation_reader(RANDOM_LENGTHS, num_lanes)
    batches = [reader.batch(step, range(num_lanes)) for step in range(reader.num_steps)]
    targets = np.sort(np.concatenate([batch.targets[batch.loss_mask] for batch in batches]))
    expected = [STRIDE * document + place for document, n in enumerate(RANDOM_LENGTHS) for place in range(1, n)]
    assert targets.tolist() == expected
    assert batches[-1].loss_mask.any()
    idle = reader.batch(reader.num_steps, range(num_lanes))
    assert (idle.document == -1).all() and not idle.loss_mask.any()


def test_training_covers_every_target_exactly_once_an_epoch():
    reader = reader_of(RANDOM_LENGTHS, num_lanes=1)
    blocks = (-(-(RANDOM_LENGTHS - 1) // 4)).sum()
    batches = [reader.batch(step, [0]) for step in range(-(-3 * blocks // 4))]
    targets = np.concatenate([batch.targets.reshape(-1, 4) for batch in batches])
    masks = np.concatenate([batch.loss_mask.reshape(-1, 4) for batch in batches])
    epochs = [targets[i * blocks : (i + 1) * blocks][masks[i * blocks : (i + 1) * blocks]] for i in range(3)]
    expected = [STRIDE * document + place for document, n in enumerate(RANDOM_LENGTHS) for place in range(1, n)]
    assert [np.sort(epoch).tolist() for epoch in epochs] == [expected] * 3
    assert epochs[0].tolist() != epochs[1].tolist()


def test_blocks_say_where_their_tokens_are_from():
    reader = reader_of(RANDOM_LENGTHS)
    for step in range(20):
        batch = reader.batch(step, range(4))
        first_inputs = batch.inputs.reshape(4, 4, 4)[:, :, 0]
        np.testing.assert_array_equal(first_inputs, STRIDE * batch.document + batch.position)
        np.testing.assert_array_equal(batch.start, batch.position == 0)
        np.testing.assert_array_equal(batch.targets[batch.loss_mask], batch.inputs[batch.loss_mask] + 1)
        assert (batch.inputs[~batch.loss_mask] == 0).all() and (batch.targets[~batch.loss_mask] == 0).all()


def test_a_batch_depends_on_its_step_alone():
    in_order, at_once = reader_of(RANDOM_LENGTHS, seed=3), reader_of(RANDOM_LENGTHS, seed=3)
    batches = [in_order.batch(step, range(4)) for step in range(8)]
    assert_batches_equal(at_once.batch(7, range(4)), batches[7])
    assert_batches_equal(at_once.batch(2, range(4)), batches[2])


def test_another_seed_is_another_order():
    first, second = (reader_of(RANDOM_LENGTHS, seed=seed).batch(0, range(4)) for seed in (0, 1))
    assert first.inputs.tolist() != second.inputs.tolist()


def test_batches_are_those_that_earlier_runs_had():
    """As in test_schedule.py, for all that readers put into a batch."""
    digest, random = hashlib.sha256(), Random(0)
    for _ in range(150):
        num_lanes, windows, w = 1 + int(random.random() * 9), random.choice([1, 3, 4]), random.choice([4, 10])
        lengths = np.array([int(random.random() * 90) for _ in range(1 + int(random.random() * 40))] + [2])
        fields = {
            "shuffle": random.random() < 0.7,
            "epochs": random.choice([1, 2, None]),
            "overlap": random.choice([0, 1, w - 1]),
            "whole_segments": random.random() < 0.3,
            "separate": random.random() < 0.3,
            "seed": int(random.random() * 100),
        }
        reader = reader_of(lengths, num_lanes, windows * w, w, **fields)
        for step in (0, 1, 7, 40):
            for column in reader.batch(step, range(num_lanes)):
                digest.update(column.tobytes())
    assert digest.hexdigest() == "99ab15158f18129c2335e24edd380c29ed9d466c78fe75ad554ae6b8df7453f5"


def test_two_hosts_make_two_halves_of_the_batch():
    whole = reader_of(RANDOM_LENGTHS).batch(5, range(4))
    halves = [reader_of(RANDOM_LENGTHS).batch(5, lanes) for lanes in ([0, 3], [1, 2])]
    for name in whole._fields:
        np.testing.assert_array_equal(getattr(halves[0], name), getattr(whole, name)[[0, 3]])
        np.testing.assert_array_equal(getattr(halves[1], name), getattr(whole, name)[[1, 2]])


def test_padding_share_of_an_epoch():
    # 3, 4 and 6 targets in 1, 1 and 2 blocks of 4: 13 of 16 positions.
    assert reader_of([4, 5, 7, 1]).padding_share == pytest.approx(3 / 16)


@pytest.mark.parametrize("num_lanes", [1, 3, 64])
@pytest.mark.parametrize("epochs", [1, 2])
def test_padding_share_of_a_finite_reader_is_what_the_masks_say(num_lanes, epochs):
    reader = reader_of(RANDOM_LENGTHS, num_lanes, shuffle=False, epochs=epochs)
    masks = [reader.batch(step, range(num_lanes)).loss_mask for step in range(reader.num_steps)]
    assert reader.padding_share == pytest.approx(1 - np.mean(masks))


@pytest.mark.parametrize("num_lanes", [1, 3])
@pytest.mark.parametrize("num_steps", [1, 7, 300])
def test_the_documents_of_some_steps_are_those_of_their_batches(num_lanes, num_steps):
    reader = reader_of(RANDOM_LENGTHS, num_lanes)
    read = {int(i) for step in range(num_steps) for i in reader.batch(step, range(num_lanes)).document.ravel()}
    assert reader.documents_read(num_steps).tolist() == sorted(read - {-1})


def test_steps_in_a_document():
    # 80 targets are 5 segments of 16, 16 targets are one: five sixths of the steps are in the first document.
    assert reader_of([81, 17]).steps_in_document == pytest.approx(5 * 5 / 6 + 1 / 6)


def test_segment_must_be_a_multiple_of_the_window():
    with pytest.raises(UserError, match="segment_length=1000 must be a multiple of window_length=512"):
        reader_of([5], segment_length=1000, window_length=512)


def test_lanes_follow_from_the_tokens_of_a_step():
    assert ReaderConfig(segment_length=512, tokens_per_step=4096).num_lanes == 8
    with pytest.raises(UserError, match="tokens_per_step=1000 must be a multiple of segment_length=512"):
        ReaderConfig(segment_length=512, tokens_per_step=1000)


@pytest.mark.parametrize("field", ["segment_length", "tokens_per_step"])
def test_config_refuses_zero(field):
    with pytest.raises(UserError, match=f"{field}=0 must be at least 1"):
        dataclasses.replace(ReaderConfig(), **{field: 0})
