"""Loading of batches: background threads make them, and move them to the devices before the step that needs them."""

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager

import grain
import jax
import numpy as np

from meliad_like.data.batch import Batch, Reader

NUM_THREADS = 2
"""The number of threads of each host that make batches in the background."""
BATCHES_AHEAD, DEVICE_BATCHES_AHEAD = 4, 2
"""The largest numbers of batches that wait in the host's memory, and in the devices' memory."""


class BatchIterator(Iterator[Batch], AbstractContextManager):
    """Batches on the devices, in the order of their steps. A `with` statement ends its threads."""

    def __init__(self, batches: "grain.DatasetIterator[Batch]"):
        self._batches = batches
        self.seconds_waited = 0.0
        """The time in seconds that the consumer has spent in `next` so far."""

    def __next__(self) -> Batch:
        """The next batch. Raises the error that the reader raised in the background."""
        began = time.perf_counter()
        try:
            return next(self._batches)
        finally:
            self.seconds_waited += time.perf_counter() - began

    def __exit__(self, *_) -> None:
        self._batches.close()


def load_batches(reader: Reader, sharding: jax.sharding.Sharding, start_step: int = 0) -> BatchIterator:
    """Iterates over batches from `start_step` on. Each host makes only the lanes that its devices hold.

    `sharding` is the sharding of the lanes (`mesh.lane_sharding`).
    """
    indices = sharding.addressable_devices_indices_map((reader.num_lanes,)).values()
    lanes = np.unique(np.concatenate([np.arange(reader.num_lanes)[index] for index in indices])).tolist()

    def to_devices(local: np.ndarray) -> jax.Array:
        return jax.make_array_from_process_local_data(sharding, local, (reader.num_lanes, *local.shape[1:]))

    num_steps = sys.maxsize if reader.num_steps is None else reader.num_steps
    batches = grain.MapDataset.range(start_step, num_steps).map(lambda step: reader.batch(step, lanes))
    loaded = batches.to_iter_dataset(grain.ReadOptions(num_threads=NUM_THREADS, prefetch_buffer_size=BATCHES_AHEAD))
    loaded = loaded.map(lambda batch: jax.tree.map(to_devices, batch))
    ahead = grain.experimental.ThreadPrefetchIterDataset
    return BatchIterator(iter(ahead(loaded, prefetch_buffer_size=DEVICE_BATCHES_AHEAD)))
