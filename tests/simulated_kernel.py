"""Runs the attention kernels in Pallas's simulation of a TPU, which prints races and fails out of bounds; memory that
nothing was written to is NaN. A program of its own, because two simulated cores need more threads than a core has.

    NPROC=16 python tests/simulated_kernel.py w rows k dtype cores dma [broken | wide | states | memory | recurrence]
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import test_attention_kernel as of_window
import test_attention_kernel_states as of_states
import test_linear_recurrence as of_recurrence
from jax.experimental.pallas import tpu as pltpu

from meliad_like.kernels import convolution_tpu, memory_tpu, recurrence_tpu, window_tpu_programs
from meliad_like.kernels.common import tpu_params
from meliad_like.kernels.convolution_tpu import convolve_in_kernel
from meliad_like.kernels.scan_tpu import scan_in_kernel
from meliad_like.kernels.states_tpu import ProjectedKeys, attend_unit_in_kernel
from meliad_like.kernels.window_tpu import Projected, attend_window_in_kernel
from meliad_like.layers.basic import kept_by_dropout
from meliad_like.layers.linear_recurrence import convolve, read_chunks, scan_channels
from meliad_like.layers.memory_search import Lookup, Memory, Operations, read_segment

B, C = 2, 2


def largest_error(subject: str, w: int, rows: int, k: int, dtype: str, cores: int, dma: str, h: int) -> float:
    """The largest difference of the simulated kernel's outputs and gradients from the default's, as a share of the
    array's largest number. NaN if one of them is. `wide`: the window is computed as two. `states`: `w` states attend to
    two blocks of tokens. `memory`: `w` tokens find the nearest of `rows` buckets in a memory of four windows, of which
    one lane's has been filled. `recurrence`: two heads for each of two groups follow the gated delta rule, in chunks of
    32 tokens, and a short convolution and a scan of channels see `w` tokens of each of two blocks."""
    generator = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(generator.standard_normal(shape), dtype)

    simulation = pltpu.InterpretParams(
        detect_races=True,
        uninitialized_memory="nan",
        out_of_bounds_reads="raise",
        num_cores_or_threads=cores,
        dma_execution_mode=dma,
    )
    # A document begins inside of the first lane's segment, and one with the second lane's.
    valid = jnp.asarray([[True, False], [False, True]])
    if subject == "states":
        one, other, query, cotangent = (normal(B, w, h * k) for _ in range(4))
        parts = [ProjectedKeys(one, other, valid[:, 0], valid[:, 1]), ProjectedKeys(other, one)]
        inputs = (query, jnp.abs(normal(h)).astype("float32"), parts), cotangent
        attends = functools.partial(attend_unit_in_kernel, rows=rows, interpret=simulation), of_states.reference
        results = [of_states.outputs_and_gradients(attend, *inputs) for attend in attends]
    elif subject == "memory":
        memory = Memory(*(normal(B, h, 4 * w, k) for _ in range(2)))
        memory_tpu.SLOTS, memory_tpu.QUERIES = 2 * w, w // 2
        query, key, value, cotangent = (normal(B, C, h, w, k) for _ in range(4))
        positions = jnp.asarray([[3 * w, 4 * w], [w, 0]])

        def outputs_and_gradient(operations):
            lookup = Lookup(rows, "bucketed", True, operations)
            outputs, pull_back = jax.vjp(lambda x: read_segment(lookup, 1, x, key, value, memory, positions), query)
            return outputs, pull_back((cotangent, memory))

        results = list(map(outputs_and_gradient, (memory_tpu.operations(simulation), Operations())))
    elif subject == "recurrence":
        rule = jax.tree.map(lambda x: x[:, :, : C * of_recurrence.BLOCK], of_recurrence.rule_of("delta"))
        convolution_tpu.LARGEST = rows
        inputs = normal(B, C * w, k), normal(B, 3, k), normal(4, k)
        scanned = [x.astype("float32") for x in (jax.nn.sigmoid(inputs[0]), inputs[0], inputs[1][:, 0])]
        read_in_kernel = functools.partial(recurrence_tpu.read_chunks_in_kernel, dtype=dtype, heads=rows // 4)
        kernels = (
            functools.partial(x, interpret=simulation) for x in (read_in_kernel, convolve_in_kernel, scan_in_kernel)
        )

        @functools.partial(jax.jit, static_argnums=0)
        def outputs_and_gradients(run, *inputs):
            outputs, pull_back = jax.vjp(run, *inputs)
            return outputs, pull_back(jax.tree.map(jnp.sin, outputs))

        results = []
        for read, convolved, scan in (kernels, (read_chunks, convolve, scan_channels)):
            read_all = functools.partial(read, start=~valid, chunk=of_recurrence.BLOCK)
            of_rule = outputs_and_gradients(read_all, rule, of_recurrence.first_states())
            of_inputs = outputs_and_gradients(functools.partial(convolved, start=~valid), *inputs)
            results.append((of_rule, of_inputs, outputs_and_gradients(scan, *scanned)))
    else:
        projected = Projected(*(normal(B, n, h * k) for n in (C * w, C * w, C * w, w, w)))
        arguments = {
            "projected": projected,
            "scale": normal(h).astype("float32"),
            "bias": normal(h, w).astype("float32"),
        }
        kept, rate = kept_by_dropout(jax.random.key(0), of_window.RATE, (h, w, w)), of_window.RATE
        options = {"rows": rows, "widest": w // 2 if subject == "wide" else w}
        kernel = functools.partial(attend_window_in_kernel, interpret=simulation, dropout_rate=rate, **options)
        attends = kernel, functools.partial(of_window.reference, mask_previous=True)
        inputs = arguments, valid, kept, normal(B, C * w, h * k)
        results = [of_window.outputs_and_gradients(attend, *inputs) for attend in attends]
    actual, expected = map(jax.tree.leaves, results)
    errors = [jnp.max(jnp.abs(x - y)) / jnp.max(jnp.abs(y)) for x, y in zip(actual, expected, strict=True)]
    return float(np.max([float(error) for error in errors]))


def break_it() -> None:
    """Lets the cores divide the lanes of a head among them, although all lanes add to the same gradients."""
    window_tpu_programs.tpu_params = lambda *_: tpu_params("parallel", "parallel", "arbitrary")


if __name__ == "__main__":
    w, rows, k, dtype, cores, dma, subject = [*sys.argv[1:], ""][:7]
    if subject == "broken":
        break_it()
    h = 1 if subject == "broken" else 2
    error = largest_error(subject, int(w), int(rows), int(k), dtype, int(cores), dma, h)
    print("largest error", error)
