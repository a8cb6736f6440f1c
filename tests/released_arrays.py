"""The arrays of released layers in tests/golden, and how exactly ours equal them."""

import functools
import pathlib

import numpy as np

GOLDEN = pathlib.Path(__file__).parent / "golden"


@functools.cache
def arrays(name):
    return dict(np.load(GOLDEN / f"{name}.npz"))


def error(ours, theirs):
    """The largest difference, relative to the largest number."""
    return np.abs(np.asarray(ours, np.float64) - theirs).max() / np.abs(theirs).max()


def assert_as_exact(ours, arrays, name):
    """Within four times the float32 error of the released code, whose arrays in float64 are the reference."""
    exact = arrays[f"{name}_64"]
    assert error(ours, exact) <= 4 * max(error(arrays[name], exact), 1e-7), name
