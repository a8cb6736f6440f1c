"""Batches of the readers that take all documents for one stream of tokens."""

import numpy as np
import pytest
from fake_split import STRIDE, FakeSplit

from meliad_like import config
from meliad_like.data.readers import LanesReaderConfig, ShuffledReaderConfig, StreamReader, StreamReaderConfig
from meliad_like.data.token_store import Totals
from meliad_like.errors import UserError

LENGTHS = [7, 1, 20, 5, 11]
STREAM = [STRIDE * document + place for document, n in enumerate(LENGTHS) for place in range(n)]
END = 4999
READERS = (StreamReaderConfig, ShuffledReaderConfig, LanesReaderConfig)


def make(num_lanes=2, segment_length=8, window_length=4, seed=0, lengths=LENGTHS, **arguments):
    split = FakeSplit(lengths)
    return StreamReader(split, num_lanes, segment_length, window_length, seed, end_of_document=END, **arguments)


def test_lanes_read_contiguous_shards():
    """44 tokens are 6 segments of 8: lane 0 reads the first three, lane 1 the others."""
    reader = make()
    batches = [reader.batch(step, range(2)) for step in range(3)]
    targets = np.concatenate([batch.targets for batch in batches], axis=1)
    inputs = np.concatenate([batch.inputs for batch in batches], axis=1)
    assert targets[0].tolist() == STREAM[:24]
    assert targets[1].tolist() == [*STREAM[24:], 0, 0, 0, 0]
    assert inputs[0].tolist() == [END, *STREAM[:23]]
    assert inputs[1].tolist() == [*STREAM[23:43], 0, 0, 0, 0]
    mask = np.concatenate([batch.loss_mask for batch in batches], axis=1)
    assert mask.sum() == 44 and mask[0].all() and not mask[1, 20:].any()
    assert reader.padding_share == pytest.approx(4 / 48)


def test_nothing_is_reset_but_at_the_beginning_of_an_epoch():
    reader = make()
    starts = [reader.batch(step, range(2)).start for step in range(7)]
    for step, start in enumerate(starts):
        np.testing.assert_array_equal(start, [[step % 3 == 0, False]] * 2)
    for name, one, other in zip(reader.batch(1, [0])._fields, reader.batch(1, [0, 1]), reader.batch(4, [0, 1])):
        np.testing.assert_array_equal(one, other, err_msg=name)


def test_blocks_say_which_document_they_begin_in():
    batch = make().batch(0, range(2))
    assert batch.document.tolist() == [[0, 0], [2, 3]]
    assert batch.position.tolist() == [[0, 4], [16, 0]]
    idle = make(num_lanes=4, segment_length=16, lengths=[20]).batch(0, range(4))
    assert idle.document.tolist() == [[0] * 4, [0, -1, -1, -1], [-1] * 4, [-1] * 4]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("num_lanes", [1, 3, 8])
def test_every_token_is_a_target_exactly_once_an_epoch(shuffle, num_lanes):
    reader = make(num_lanes, epochs=2, shuffle=shuffle)
    steps = reader.num_steps // 2
    for epoch in range(2):
        batches = [reader.batch(epoch * steps + step, range(num_lanes)) for step in range(steps)]
        targets = np.concatenate([batch.targets[batch.loss_mask] for batch in batches])
        assert sorted(targets.tolist()) == STREAM
        assert reader.padding_share == pytest.approx(1 - np.mean([batch.loss_mask for batch in batches]))


def test_bits_per_byte_are_over_the_targets_that_a_reader_has():
    """Of two documents of six tokens a stream predicts twelve, the other readers ten."""
    totals = Totals(documents=2, tokens=12, bytes=30, words=4)
    assert [reader().bytes_per_target([totals]) for reader in READERS] == [2.5, 2.5, 3.0]


def test_shuffled_segments_are_segments_of_the_stream():
    reader = make(shuffle=True)
    orders = []
    for epoch in range(2):
        batches = [reader.batch(3 * epoch + step, range(2)) for step in range(3)]
        assert all(batch.start.tolist() == [[True, False]] * 2 for batch in batches)
        segments = np.concatenate([batch.targets for batch in batches])
        orders.append([STREAM.index(segment[0]) // 8 for segment in segments])
        for segment, index in zip(segments, orders[-1]):
            assert segment[: 44 - 8 * index].tolist() == STREAM[8 * index : 8 * index + 8]
    assert sorted(orders[0]) == sorted(orders[1]) == [*range(6)]
    assert orders[0] != orders[1]


def test_a_batch_depends_on_seed_and_step_alone():
    in_order, at_once = make(shuffle=True, seed=3), make(shuffle=True, seed=3)
    batches = [in_order.batch(step, range(2)) for step in range(8)]
    for step in (7, 2):
        np.testing.assert_array_equal(at_once.batch(step, range(2)).inputs, batches[step].inputs)
        np.testing.assert_array_equal(at_once.batch(step, [1]).inputs, batches[step].inputs[1:])
    other = make(shuffle=True, seed=4)
    assert any((other.batch(step, range(2)).inputs != batches[step].inputs).any() for step in range(3))


def test_the_kind_of_reader_is_checked():
    with pytest.raises(
        UserError, match="RunConfig.data = 'streams' is not one of ancient_history, lanes, mixture, shuffled"
    ):
        config.parse([], ["RunConfig.data = 'streams'"])
