"""Runs the attention kernel in Pallas's simulation of a TPU, which prints races and fails out of bounds; memory that
nothing was written to is NaN. A program of its own, because two simulated cores need more threads than a core has.

    NPROC=16 python tests/simulated_kernel.py w rows k dtype cores dma [broken]
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from test_attention_kernel import outputs_and_gradients, reference

from meliad_like.layers import attention_kernel
from meliad_like.layers.attention_kernel import Projected, attend_window_in_kernel
from meliad_like.layers.basic import dropout_multiplier

B, C = 2, 2


def largest_error(w: int, rows: int, k: int, dtype: str, cores: int, dma: str, h: int = 2) -> float:
    """The largest difference of the simulated kernel's outputs and gradients from the default's, as a share of the
    array's largest number. NaN if one of them is."""
    generator = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(generator.standard_normal(shape), dtype)

    projected = Projected(*(normal(B, n, h * k) for n in (C * w, C * w, C * w, w, w)))
    arguments = {"projected": projected, "scale": normal(h).astype("float32"), "bias": normal(h, w).astype("float32")}
    # A document begins inside of the first lane's segment, and one with the second lane's.
    valid = jnp.asarray([[True, False], [False, True]])
    multiplier = dropout_multiplier(jax.random.key(0), 0.3, (h, w, w), jnp.float32)
    simulation = pltpu.InterpretParams(
        detect_races=True,
        uninitialized_memory="nan",
        out_of_bounds_reads="raise",
        num_cores_or_threads=cores,
        dma_execution_mode=dma,
    )
    kernel = functools.partial(attend_window_in_kernel, rows=rows, interpret=simulation, mask_previous=True)
    default = functools.partial(reference, mask_previous=True)
    inputs = arguments, valid, multiplier, normal(B, C * w, h * k)
    actual, expected = (jax.tree.leaves(outputs_and_gradients(attend, *inputs)) for attend in (kernel, default))
    errors = [jnp.max(jnp.abs(x - y)) / jnp.max(jnp.abs(y)) for x, y in zip(actual, expected, strict=True)]
    return float(np.max([float(error) for error in errors]))


def break_it() -> None:
    """Lets the cores divide the lanes of a head among them, although all lanes add to the same gradients."""
    params = pltpu.CompilerParams
    attention_kernel.pltpu.CompilerParams = lambda dimension_semantics, **options: params(
        dimension_semantics=("parallel", "parallel", "arbitrary"), **options
    )


if __name__ == "__main__":
    w, rows, k, dtype, cores, dma, *broken = sys.argv[1:]
    if broken:
        break_it()
    error = largest_error(int(w), int(rows), int(k), dtype, int(cores), dma, h=1 if broken else 2)
    print("largest error", error)
