"""Batches arrive on the devices in order, from any step, and each host makes only its own lanes."""

import socket
import time

import forked
import jax
import numpy as np
import pytest
from fake_split import FakeSplit
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tiny_run import environment

from meliad_like.data.loading import load_batches
from meliad_like.data.readers import LanesReader
from meliad_like.errors import UserError

LENGTHS = np.random.default_rng(2).integers(2, 90, size=30)


def make_reader(num_lanes=8, **arguments):
    return LanesReader(FakeSplit(LENGTHS), num_lanes, 16, 4, **arguments)


@pytest.fixture
def sharding():
    mesh = jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


class SlowReader:
    """A reader that takes some time for each batch, and records the batches made."""

    num_lanes = 8
    num_steps = None

    def __init__(self, seconds):
        self.seconds = seconds
        self.steps = []

    def batch(self, step, lanes):
        self.steps.append(step)
        time.sleep(self.seconds)
        return make_reader().batch(step, lanes)


def test_batches_come_in_order_from_any_step(sharding):
    reader = make_reader()
    with load_batches(reader, sharding, start_step=5) as batches:
        for step in range(5, 20):
            batch, expected = next(batches), reader.batch(step, range(8))
            for name in batch._fields:
                value = getattr(batch, name)
                assert value.sharding == sharding
                np.testing.assert_array_equal(value, getattr(expected, name), err_msg=name)


def test_a_finite_reader_ends(sharding):
    reader = make_reader(shuffle=False, epochs=1)
    with load_batches(reader, sharding) as batches:
        assert sum(int(batch.loss_mask.sum()) for batch in batches) == (LENGTHS - 1).sum()
    with load_batches(reader, sharding, start_step=reader.num_steps) as batches:
        assert list(batches) == []


def test_an_error_in_the_background_reaches_the_consumer_as_itself(sharding):
    class Damaged(FakeSplit):
        def tokens(self, document, start, stop):
            raise UserError("a token is not in the vocabulary")

    batches = load_batches(LanesReader(Damaged(LENGTHS), 8, 16, 4), sharding)
    with batches, pytest.raises(UserError, match="a token is not in the vocabulary"):
        next(batches)


def test_batches_are_made_before_they_are_asked_for(sharding):
    reader = SlowReader(0.0)
    with load_batches(reader, sharding) as batches:
        next(batches)
        deadline = time.monotonic() + 10
        while len(reader.steps) < 6 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert set(reader.steps) >= set(range(6))


def test_the_time_waited_is_measured(sharding, monkeypatch):
    monkeypatch.setattr("meliad_like.data.loading.NUM_THREADS", 1)
    with load_batches(SlowReader(0.2), sharding) as batches:
        next(batches)
        assert batches.seconds_waited > 0.19
        waited = batches.seconds_waited
        time.sleep(1.0)
        next(batches)
        # The second batch was made while the consumer was busy, and its own time does not count.
        assert batches.seconds_waited - waited < 0.5


PROCESS = """
import jax, numpy as np, sys
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{sys.argv[1]}", 2, int(sys.argv[2]))
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from meliad_like.data.loading import load_batches
from test_loading import make_reader

# A mesh whose order of devices goes back and forth between the processes.
devices = np.array(jax.devices())[[0, 2, 3, 1]].reshape(2, 2)
sharding = NamedSharding(Mesh(devices, ("data", "fsdp")), PartitionSpec(("data", "fsdp")))
asked = []

class NotingReader:
    num_lanes, num_steps = 8, None
    def batch(self, step, lanes):
        asked.append(list(lanes))
        return make_reader().batch(step, lanes)

with load_batches(NotingReader(), sharding, start_step=3) as batches:
    batch = next(batches)
expected = make_reader().batch(3, range(8))
for value, whole in zip(batch, expected):
    assert value.shape == whole.shape
    for shard in value.addressable_shards:
        np.testing.assert_array_equal(shard.data, whole[shard.index])
print("lanes", asked[0])
"""


def test_two_processes_make_only_their_own_lanes():
    with socket.create_server(("localhost", 0)) as server:
        port = str(server.getsockname()[1])
    processes = [forked.Process(["-c", PROCESS, port, str(index)], environment(num_devices=2)) for index in range(2)]
    results = [process.finish() for process in processes]
    assert [result.returncode for result in results] == [0, 0], results
    assert [result.stdout.strip() for result in results] == ["lanes [0, 1, 6, 7]", "lanes [2, 3, 4, 5]"]
