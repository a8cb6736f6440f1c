"""The check of the kernels when a program starts: on the program's device, against the default computation.

Kernels of attention and kernels of recurrences are checked, and used, independently of each other.

Where devices are only planned (`meliad_like.plan`), the kernels must compile for them.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from meliad_like.kernels.registry import KERNELS, RECURRENCES, kernel_of_platform
from meliad_like.layers.backend import platform
from meliad_like.mixers.base import MIXERS, DecoderShape, KernelKind, LayerContext, Mixer
from meliad_like.mixers.sliding_window import WindowAttention

BLOCKS_READ = ((1000, 1001, 0), (0, 1, 2))
"""The number of blocks of the document before each block, in two lanes. In the first, a document continues, long enough
to have filled an external memory, and another begins; in the second, a document begins and continues. Outputs depend on
the update of the states by a block only if the document continues after it."""
MOST_TIMES = 2
"""The largest ratio of the kernel's rounding errors and the default's, both against float32. They round at the same
places, so the ratio is near 1 in large arrays; a wrong index makes errors as large as the numbers."""
ERRORS = {"float32": 1e-4, "bfloat16": 2.0**-7}
"""The error that is always allowed, relative to the array: in float32 the error of sums in another order; otherwise the
distance of two numbers of the type, because in an array of few numbers the ratio may be anything."""


def kernel_that_works(shape: DecoderShape, dtype: str, kind: KernelKind, kernel: str | None = None) -> str:
    """The kernel of this kind, if it passes the check, otherwise `none`. None: the platform's kernel for these sizes.

    One line on stderr says what was found. All processes must call it, and get the same result.
    """
    if kind == "attention" and _has_window(shape):
        kernel = kernel or kernel_of_platform(shape.window_length, shape.head_size)
        position = functools.partial(shape.position.build, shape.window_length, shape.num_heads)
        is_used = kernel != "none" and not nnx.eval_shape(lambda: position(rngs=nnx.Rngs(0))).changes_keys
    else:
        names = KERNELS if kind == "attention" else RECURRENCES
        kernel = kernel or (platform() if platform() in names else "none")
        with_kernel = dataclasses.replace(shape, **{f"{kind}_kernel": kernel})
        is_used = any(mixer.has_kernel(with_kernel, kind) for mixers in shape.layers for mixer in mixers)
    # The devices, if they are not here.
    planned = jax.sharding.get_abstract_mesh().abstract_device if platform() != jax.default_backend() else None
    return _checked(shape, dtype, kind, kernel, planned and planned.device_kind) if is_used else "none"


def _has_window(shape: DecoderShape) -> bool:
    return any(mixer.has_window for mixers in shape.layers for mixer in mixers)


@functools.cache
def _checked(shape: DecoderShape, dtype: str, kind: KernelKind, kernel: str, planned_for: str | None) -> str:
    """Checks a kernel of the kind `attention` or `recurrence` once; `planned_for`: the kind of devices not here."""
    problem = _problem(shape, dtype, kind, kernel, planned_for is not None)
    if jax.process_count() > 1 and not np.all(multihost_utils.process_allgather(np.asarray(problem is None))):
        problem = problem or "another process refuses it"
    passed = f"compiled for {planned_for}" if planned_for else "checked on this device"
    refused = f"the default is used instead: {problem}"
    print(f"{kind} kernel: {passed if problem is None else refused}", file=sys.stderr, flush=True)
    return kernel if problem is None else "none"


def _problem(shape: DecoderShape, dtype: str, kind: KernelKind, kernel: str, planned: bool) -> str | None:
    """The reason in one line why the kernel can't be used; None if it compiles and its results are the default's."""

    def with_kernel(name: str) -> DecoderShape:
        return dataclasses.replace(shape, **{f"{kind}_kernel": name})

    for name, build, with_dropout in _modules(with_kernel(kernel), kind):
        which = f"{name}{' with dropout' * with_dropout}: "
        trial = functools.partial(_trial, build, with_dropout=with_dropout, rounded_to=dtype)
        try:
            run, make_inputs = trial(with_kernel(kernel), dtype)
            if planned:
                run.lower(jax.eval_shape(make_inputs)).compile()
                continue
            results = _results(run, make_inputs)
        except Exception as error:  # whatever a compiler that refuses a kernel, or a device that stops in it, raises
            return f"{which}it does not compile or run ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        default = _results(*trial(with_kernel("none"), dtype))
        with jax.default_matmul_precision("highest"):
            exact = _results(*trial(with_kernel("none"), "float32"))
        for array, x in exact.items():
            for order in (2, np.inf):
                error, of_default = (np.linalg.norm(each[array] - x, order) for each in (results, default))
                allowed = MOST_TIMES * of_default + ERRORS[dtype] * np.linalg.norm(x, order)
                # `error > allowed` would accept NaN.
                if not error <= allowed:
                    return f"{which}the error of {array} is {error:.3g}, and should be at most {allowed:.3g}"
    return None


def _modules(shape: DecoderShape, kind: KernelKind) -> Iterator[tuple[str, Callable[..., Mixer], bool]]:
    """The modules that are checked: names and constructors of those that use the kernels, with or without dropout."""
    for with_dropout in (
        (False, True)[: 1 + (shape.dropout_rate > 0)] if kind == "attention" and _has_window(shape) else ()
    ):
        yield "the window", WindowAttention, with_dropout
    for mixer in {mixer: None for mixers in shape.layers for mixer in mixers}:
        if mixer.has_kernel(shape, kind):
            yield MIXERS.name_of(mixer), mixer.build, False


def _trial(
    build: Callable[..., Mixer], shape: DecoderShape, dtype: str, *, rounded_to: str, with_dropout: bool
) -> tuple[Any, Callable[[], dict[str, Any]]]:
    """A jitted function that computes a module's outputs, its states after them and the gradients of all inputs, and
    another that makes these, numbers of the type `rounded_to`."""
    b, c, w = len(BLOCKS_READ), len(BLOCKS_READ[0]), shape.window_length

    def module():
        return build(shape, rngs=nnx.Rngs(0))

    graphdef, _ = nnx.split(nnx.eval_shape(module))
    carried, structure = jax.tree.flatten(jax.eval_shape(lambda: module().init_carry(b, jnp.dtype(dtype))))
    read = np.asarray(BLOCKS_READ) * w

    def is_position(x) -> bool:
        return jnp.issubdtype(x.dtype, jnp.integer)

    def rounded(x: jax.Array, kind: Any = dtype) -> jax.Array:
        return x.astype(rounded_to).astype(kind)

    def make_inputs():
        keys = iter(jax.random.split(jax.random.key(0), 99))

        def normal(*sizes: int) -> jax.Array:
            return jax.random.normal(next(keys), sizes)

        # Perturbed, so that no scale is 1 and no bias is 0.
        params = jax.tree.map(lambda x: x + 0.3 * normal(*x.shape), nnx.state(module()))
        inputs = {"tokens": rounded(normal(b, c * w, shape.model_width)), "parameters": params}
        # Cached keys have about unit length.
        vectors = [x for x in carried if not is_position(x)]
        return inputs | {"carry": [rounded(normal(*x.shape) / np.sqrt(x.shape[-1]), x.dtype) for x in vectors]}

    # The time of products doesn't matter here, and a GPU's compiler takes longest to try their algorithms.
    @functools.partial(jax.jit, compiler_options={"xla_gpu_autotune_level": 0} if platform() == "gpu" else None)
    def run(inputs):
        def attend(inputs):
            vectors = iter(inputs["carry"])
            carry = structure.unflatten([read[:, 0] if is_position(x) else next(vectors) for x in carried])
            dropout_key = jax.random.key(1) if with_dropout else None
            context = LayerContext(jnp.asarray(read), {})
            outputs, carry = nnx.merge(graphdef, inputs["parameters"])(inputs["tokens"], context, carry, dropout_key)
            return {"outputs": outputs, "carry": [x for x in jax.tree.leaves(carry) if not is_position(x)]}

        results, pull_back = jax.vjp(attend, inputs)
        cotangents = [rounded(jax.random.normal(jax.random.key(2), x.shape), x.dtype) for x in jax.tree.leaves(results)]
        gradients = pull_back(jax.tree.unflatten(jax.tree.structure(results), cotangents))[0]
        return results | {"gradients": gradients}

    return run, make_inputs


def _results(run: Any, make_inputs: Callable[[], dict[str, Any]]) -> dict[str, np.ndarray]:
    """The outputs and gradients of a trial by name, flat."""
    leaves, _ = jax.tree.flatten_with_path(run(make_inputs()))
    names = (jax.tree_util.keystr(path, simple=True, separator=" ") for path, _ in leaves)
    return {name: np.asarray(x, np.float32).ravel() for name, (_, x) in zip(names, leaves, strict=True)}
