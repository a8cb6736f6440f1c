"""A long prompt that is read once, and many continuations from its state: as one batch, and one by one.

python benchmarks/branching.py

The parameters are random, which changes neither time nor memory.
"""

import json
import resource
import subprocess
import sys
import time

import jax
import numpy as np
from absl import app, flags
from rich.console import Console

from meliad_like import config
from meliad_like.library import LanguageModel
from meliad_like.models.model import Model
from meliad_like.run.opening import OpenedCheckpoint
from meliad_like.tables import Table
from meliad_like.vocabularies.base import ByteVocabulary

GIN_FILE = flags.DEFINE_multi_string("gin_file", ["size/laptop.gin", "block_recurrent/fixed_skip.gin"], "The model.")
PROMPT = flags.DEFINE_integer("prompt", 100_000, "Tokens of the prompt.")
CONTINUATIONS = flags.DEFINE_integer("continuations", 64, "Continuations of the prompt.")
TOKENS = flags.DEFINE_integer("tokens", 128, "Tokens of a continuation, whole blocks.")
ONLY = flags.DEFINE_enum("only", None, ["one_by_one", "batch"], "Measure this alone, and print it as JSON.")


def main(_):
    if ONLY.value is not None:
        print(json.dumps(measure(batched=ONLY.value == "batch")))
        return
    single, batch = (run_alone(which) for which in ("one_by_one", "batch"))
    number, written = CONTINUATIONS.value, CONTINUATIONS.value * TOKENS.value
    reading = min(single["read"], batch["read"])
    rows = [
        (f"{number} continuations, {how}", f"{seconds:.1f}", f"{1e3 * seconds / written:.3f}", memory)
        for how, seconds, memory in (
            ("one batch", batch["write"], f"{batch['peak']:.0f}"),
            ("one by one", single["write"], f"{single['peak']:.0f}"),
            ("one by one, each reading the prompt", number * reading + single["write"], ""),
        )
    ]
    title = f"{PROMPT.value:,} tokens, read once in {reading:.1f} s, are a state of {batch['state']:.2f} MB"
    header = ("what", "seconds", "ms per token", "peak memory of the process, MB")
    Console(width=120).print(Table(title, header, rows).to_rich())


def run_alone(which: str) -> dict[str, float]:
    """The measurement in a process of its own, whose peak memory is not that of another measurement."""
    done = subprocess.run([sys.executable, *sys.argv, f"--only={which}"], check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


def measure(batched: bool) -> dict[str, float]:
    """Seconds and megabytes."""
    run, vocabulary = config.parse(GIN_FILE.value), ByteVocabulary()
    model = Model(run.model, vocabulary.size)
    params = jax.jit(model.init)(jax.random.key(0))
    lm = LanguageModel(OpenedCheckpoint(run, model, params, vocabulary, 0))
    prompt = np.random.default_rng(0).integers(0, 256, PROMPT.value + 1)
    seeds = list(range(CONTINUATIONS.value))
    groups = [seeds] if batched else [[seed] for seed in seeds]
    # Compiles everything.
    write(lm, lm.read(prompt[: 2 * run.data.segment_length]), groups[0])
    began = time.perf_counter()
    book = lm.read(prompt)
    jax.block_until_ready(book.batch_of_one.carry)
    reading = time.perf_counter() - began
    return {
        "read": reading,
        "write": sum(write(lm, book, group) for group in groups),
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
        "state": sum(leaf.nbytes for leaf in jax.tree.leaves(book.batch_of_one.carry)) / 1e6,
    }


def write(lm: LanguageModel, state, seeds) -> float:
    """Seconds to write a continuation for each seed."""
    began = time.perf_counter()
    for one in lm.generate_batch([state] * len(seeds), TOKENS.value, seeds=seeds, stop_at_end=False, chunk=64):
        assert len(one.tokens) == TOKENS.value
    return time.perf_counter() - began


if __name__ == "__main__":
    app.run(main)
