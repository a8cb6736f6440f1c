"""Reads a long document with a published model: its memory, its speed, and a state that another process continues.

    python benchmarks/long_reading.py FOLDER --tokens=100000

The document consists of random tokens. After each tenth of it the resident memory of this process is printed. Then the
state is saved, and another process scores the next tokens after it.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import meliad_like

CONTINUED = 1000
"""The number of tokens that both processes score after the document."""


def resident() -> int:
    """The resident memory of this process, in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmRSS"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder of transformers, or one of ours")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--resume", type=Path, nargs=2, help="a saved state, and a file for the scores after it")
    arguments = parser.parse_args()
    lm = meliad_like.load(arguments.folder)
    tokens = np.random.default_rng(0).integers(0, lm.vocabulary.size, arguments.tokens + CONTINUED)
    document, rest = np.split(tokens, [arguments.tokens])
    if arguments.resume:
        state, output = arguments.resume
        np.save(output, lm.score(rest, lm.resume(state)).log_probabilities)
        return
    print(lm)
    state, began = None, time.perf_counter()
    for piece in np.array_split(document, 10):
        state = lm.read(piece, state)
        size = sum(array.nbytes for array in state.arrays.values())
        seconds = time.perf_counter() - began
        print(f"{state.num_tokens:>9,} tokens, {seconds:6.1f} s, state {size:,}, memory {resident():,}", flush=True)
    assert state is not None
    with tempfile.TemporaryDirectory() as folder:
        saved, output = Path(folder) / "state.npz", Path(folder) / "scores.npy"
        state.save(saved)
        command = [sys.executable, __file__, arguments.folder, f"--tokens={arguments.tokens}", "--resume"]
        subprocess.run([*command, saved, output], check=True)
        difference = np.abs(np.load(output) - lm.score(rest, state).log_probabilities).max()
    print(f"largest difference of {CONTINUED:,} log-probabilities in the two processes: {difference:.3g}")


if __name__ == "__main__":
    main()
