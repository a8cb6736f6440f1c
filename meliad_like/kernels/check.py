"""The check of a kernel when a program starts: on the program's device, against the default computation.

Where devices are only planned (`meliad_like.plan`), the kernel must compile for them.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

from meliad_like.errors import one_line
from meliad_like.layers.backend import platform

MOST_TIMES = 2
"""The largest ratio of the kernel's rounding errors and the default's, both against float32. They round at the same
places, so the ratio is near 1 in large arrays; a wrong index makes errors as large as the numbers."""
ERRORS = {"float32": 1e-4, "bfloat16": 2.0**-7}
"""The error that is always allowed, relative to the array: in float32 the error of sums in another order; otherwise the
distance of two numbers of the type, because in an array of few numbers the ratio may be anything."""

Computation = tuple[Callable[[Any], Any], Callable[[], Any]]
"""A function from a tree of arrays to another one, and the function that makes its argument, the same each time."""


class Trial(NamedTuple):
    """A computation in which a kernel takes part."""

    name: str
    """The name of the computation in a message."""
    make: Callable[[str, str], Computation]
    """The function (name of the kernel, dtype) -> the computation with this kernel, `none` for the default, in it."""


def try_kernel(kernel: str, dtype: str, kind: str, trials: Iterable[Trial], planned_for: str | None) -> str:
    """The kernel, if it passes all trials in this dtype, otherwise `none`. One line on stderr says what was found.

    All processes must call it, and get the same result.

    Args:
        kind: the word for the kernel in the line.
        planned_for: the kind of the devices, if they are only planned; None: they are here.
    """
    problems = (_problem(kernel, dtype, trial, planned_for is not None) for trial in trials)
    problem = next((problem for problem in problems if problem is not None), None)
    if jax.process_count() > 1 and not np.all(multihost_utils.process_allgather(np.asarray(problem is None))):
        problem = problem or "another process refuses it"
    passed = f"compiled for {planned_for}" if planned_for else "checked on this device"
    refused = f"the default is used instead: {problem}"
    print(f"{kind} kernel: {passed if problem is None else refused}", file=sys.stderr, flush=True)
    return kernel if problem is None else "none"


def _problem(kernel: str, dtype: str, trial: Trial, planned: bool) -> str | None:
    """The reason in one line why the kernel can't be used; None if it compiles and its results are the default's."""
    try:
        run, make_inputs = trial.make(kernel, dtype)
        if planned:
            _jitted(run).lower(jax.eval_shape(make_inputs)).compile()
            return None
        results = _results(run, make_inputs)
    except Exception as error:  # whatever a compiler that refuses a kernel, or a device that stops in it, raises
        reason = f"{type(error).__name__}: {one_line(error)[:200]}"
        return f"{trial.name}: it does not compile or run ({reason})"
    default = _results(*trial.make("none", dtype))
    with jax.default_matmul_precision("highest"):
        exact = _results(*trial.make("none", "float32"))
    for array, x in exact.items():
        for order in (2, np.inf):
            error, of_default = (np.linalg.norm(each[array] - x, order) for each in (results, default))
            allowed = MOST_TIMES * of_default + ERRORS[dtype] * np.linalg.norm(x, order)
            # `error > allowed` would accept NaN.
            if not error <= allowed:
                return f"{trial.name}: the error of {array} is {error:.3g}, and should be at most {allowed:.3g}"
    return None


def _jitted(run: Callable[[Any], Any]) -> jax.stages.Wrapped:
    # The time of products doesn't matter here, and a GPU's compiler takes longest to try their algorithms.
    return jax.jit(run, compiler_options={"xla_gpu_autotune_level": 0} if platform() == "gpu" else None)


def _results(run: Callable[[Any], Any], make_inputs: Callable[[], Any]) -> dict[str, np.ndarray]:
    """The arrays that a computation returns by name, flat."""
    leaves, _ = jax.tree.flatten_with_path(_jitted(run)(make_inputs()))
    names = (jax.tree_util.keystr(path, simple=True, separator=" ") for path, _ in leaves)
    return {name: np.asarray(x, np.float32).ravel() for name, (_, x) in zip(names, leaves, strict=True)}
