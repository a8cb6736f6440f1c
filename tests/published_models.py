"""Tiny published models that transformers 5.24 wrote, and the errors that their logits may have."""

import json
import shutil
from pathlib import Path

import numpy as np

import meliad_like

GOLDEN = Path(__file__).parent / "golden" / "published"
W = 8
"""The length of a block: shorter than spans of attention, and no multiple of all of them."""
PADDED = 72


def opened(name, **bindings):
    bindings = {"DecoderConfig.window_length": W, "ReaderConfig.segment_length": 3 * W} | bindings
    return meliad_like.load(GOLDEN / name, gin_params=[f"{key} = {value!r}" for key, value in bindings.items()])


def padded(ids):
    return np.pad(ids, ((0, 0), (0, -ids.shape[1] % W))).astype(np.int32)


def assert_logits(logits, expected, name):
    """Errors of at most four times those of transformers."""
    error = 4 * expected[f"{name}error"] * expected[f"{name}scale"]
    wanted = {"": "logits", "long_": "long"}[name]
    np.testing.assert_allclose(logits, expected[wanted], rtol=0, atol=float(error))


def no_starts(b, blocks):
    return np.zeros((b, blocks), bool)


def copied(name, folder, changes):
    shutil.copytree(GOLDEN / name, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder
