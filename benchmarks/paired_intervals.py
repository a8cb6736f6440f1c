"""How much a model's loss differs from a baseline's, with an interval over documents and seeds.

    python benchmarks/paired_intervals.py --model=runs/a-{seed}.json --baseline=runs/b-{seed}.json

The files are those of `python -m meliad_like.evaluate --output`, of the same documents. Documents and seeds are drawn
with replacement, independently of each other (bootstrap); each draw gives a difference in bits per byte.
"""

import json
from pathlib import Path

import numpy as np
from absl import app, flags

MODEL = flags.DEFINE_string("model", None, "The model's files, with {seed}.", required=True)
BASELINE = flags.DEFINE_string("baseline", None, "The baseline's files, with {seed}.", required=True)
SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "The seeds.")
RESAMPLES = 10_000
LEVEL = 0.95


def read(pattern: str) -> tuple[dict[str, int], np.ndarray]:
    """The bytes of each document by its name, and the bits of the documents [seed, document]."""
    runs = [json.loads(Path(pattern.format(seed=seed)).read_text())["documents"] for seed in SEEDS.value]
    by_name = [{one["name"]: one for one in run} for run in runs]
    num_bytes = {name: one["num_bytes"] for name, one in by_name[0].items()}
    return num_bytes, np.array([[run[name]["nats"] / np.log(2) for name in num_bytes] for run in by_name])


def main(_):
    num_bytes, bits = read(MODEL.value)
    same, baseline_bits = read(BASELINE.value)
    if num_bytes != same:
        raise SystemExit("error: the files are of other documents")
    lengths, difference = np.array(list(num_bytes.values())), bits - baseline_bits
    generator = np.random.default_rng(0)
    num_seeds, num_documents = difference.shape
    seeds = generator.integers(num_seeds, size=(RESAMPLES, num_seeds, 1))
    documents = generator.integers(num_documents, size=(RESAMPLES, 1, num_documents))
    drawn = difference[seeds, documents].mean(1).sum(1) / lengths[documents[:, 0]].sum(1)
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    mean, baseline_mean = (x.mean(0).sum() / lengths.sum() for x in (bits, baseline_bits))
    print(f"{mean:.4f} bits per byte, the baseline {baseline_mean:.4f}")
    print(f"difference {mean - baseline_mean:+.4f}, {LEVEL:.0%} interval {low:+.4f} to {high:+.4f}")
    by_seed = ", ".join(f"{x:+.4f}" for x in difference.sum(1) / lengths.sum())
    print(f"by seed {by_seed}; better in {(difference.mean(0) < 0).sum()} of {num_documents} documents")


if __name__ == "__main__":
    app.run(main)
