"""Tokens per second of the lanes reader, in the calling thread, and in background threads that fill the devices; or
the time and memory of a schedule of many documents.

python benchmarks/reader_speed.py                  # synthetic documents in a memory-mapped file
python benchmarks/reader_speed.py --store=FOLDER   # a token store written by `python -m meliad_like.prepare`
python benchmarks/reader_speed.py --schedule=10000000 # the schedule of an epoch of as many documents
"""

import pathlib
import resource
import tempfile
import time

import jax
import numpy as np
from absl import app, flags
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meliad_like.data.loading import load_batches
from meliad_like.data.readers import LanesReader, ReaderConfig
from meliad_like.data.schedule import Schedule
from meliad_like.data.split import Documents
from meliad_like.data.token_store import TokenStore

STORE = flags.DEFINE_string("store", None, "Token store; without one, documents are made up.")
SEGMENT_LENGTH = flags.DEFINE_integer("segment_length", 4096, "Tokens that each lane reads in a step.")
WINDOW_LENGTH = flags.DEFINE_integer("window_length", 512, "Tokens in a block.")
TOKENS_PER_STEP = flags.DEFINE_integer("tokens_per_step", 131072, "Tokens of a step over all lanes.")
SECONDS = flags.DEFINE_float("seconds", 5.0, "How long each of the two measurements takes.")
SCHEDULE = flags.DEFINE_integer("schedule", 0, "Number of documents of 8 blocks in the mean to deal to 256 lanes.")

SYNTHETIC_VOCABULARY_SIZE = 32000


def synthetic_split(folder: str) -> Documents:
    """1000 documents of 2 to 100,000 random tokens, 16 bits each, in a memory-mapped file: about 100 MB."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(2, 100_000, size=1000)
    begins = np.cumsum(lengths) - lengths
    path = pathlib.Path(folder) / "tokens.bin"
    generator.integers(0, SYNTHETIC_VOCABULARY_SIZE, size=lengths.sum(), dtype=np.uint16).tofile(path)
    stored = np.memmap(path, np.uint16, "r")

    def read(document: int, start: int, stop: int) -> np.ndarray:
        return stored[begins[document] + start : begins[document] + stop].astype(np.int32)

    indices = np.arange(lengths.size)
    return Documents([str(index) for index in indices], lengths, lengths, lengths, read, indices)


def measure(next_batch, seconds: float) -> tuple[float, float]:
    """Tokens per second and milliseconds per batch, after one batch that doesn't count."""
    tokens = next_batch().inputs.size
    began = time.perf_counter()
    count = 0
    while (elapsed := time.perf_counter() - began) < seconds:
        jax.block_until_ready(next_batch())
        count += 1
    return count * tokens / elapsed, 1000 * elapsed / count


def report(split: Documents) -> None:
    config = ReaderConfig(segment_length=SEGMENT_LENGTH.value, tokens_per_step=TOKENS_PER_STEP.value)
    reader = LanesReader(split, config.num_lanes, config.segment_length, WINDOW_LENGTH.value)
    print(
        f"{len(split.lengths)} documents, {split.lengths.sum():,} tokens; {config.num_lanes} lanes of "
        f"{config.segment_length} tokens, window {WINDOW_LENGTH.value}; {reader.padding_share:.2%} padding"
    )
    print(f"{'':38}{'tokens/s':>14}{'ms/batch':>10}")
    steps = iter(range(2**31))
    speeds = {"reader alone": measure(lambda: reader.batch(next(steps), range(config.num_lanes)), SECONDS.value)}
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    with load_batches(reader, sharding) as batches:
        speeds["in the background, and on the devices"] = measure(lambda: next(batches), SECONDS.value)
    for name, (tokens_per_second, milliseconds) in speeds.items():
        print(f"{name:38}{tokens_per_second:>14,.0f}{milliseconds:>10.2f}")


def report_schedule(num_documents: int) -> None:
    blocks = np.random.default_rng(0).geometric(1 / 8, num_documents)
    for what, query in {
        "first segment": lambda each: each.runs(0, 0, 8),
        "epoch": lambda each: each.num_steps(8),
    }.items():
        before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        query(Schedule(blocks, 256, 0, epochs=1))
        after, seconds = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter() - began
        processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(
            f"{num_documents:,} documents, {what}: {seconds:.2f} s, {processor:.2f} s of a processor, "
            f"{(after.ru_maxrss - before.ru_maxrss) / 1024:.0f} MB more at the peak"
        )


def main(_) -> None:
    if SCHEDULE.value:
        report_schedule(SCHEDULE.value)
    elif STORE.value:
        report(TokenStore(STORE.value).split("train"))
    else:
        with tempfile.TemporaryDirectory() as folder:
            report(synthetic_split(folder))


if __name__ == "__main__":
    app.run(main)
