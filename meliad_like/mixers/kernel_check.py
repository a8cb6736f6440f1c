"""The check of the attention kernel when a program starts: on the program's device, against the default computation."""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from meliad_like.layers.attention import unit
from meliad_like.layers.backend import platform
from meliad_like.layers.kernels import kernel_of_platform
from meliad_like.mixers.base import At, Shape
from meliad_like.mixers.sliding_window import WindowAttention
from meliad_like.mixers.token_heads import TokenCache

BLOCKS_READ = ((1, 0, 1), (0, 1, 0))
"""The number of blocks of its document before each block, of two lanes: documents begin inside, and end there."""
MOST_TIMES = 2
"""The largest ratio of the kernel's rounding errors and the default's, both against float32. They round at the same
places, so the ratio is near 1 in large arrays; a wrong index makes errors as large as the numbers."""
ERRORS = {"float32": 1e-4, "bfloat16": 2.0**-7}
"""The error that is allowed in any case, relative to the array: in float32 that of sums in another order; otherwise the
distance of two numbers of the type, because in an array of few numbers the ratio may be anything."""


@functools.cache
def kernel_that_works(shape: Shape, dtype: str, kernel: str | None = None) -> str:
    """The kernel, if it passes the check, otherwise `none`. None: that of this process's platform for these sizes.

    One line on stderr says what was found. All processes must call it, and get the same result.
    """
    kernel = kernel or kernel_of_platform(shape.window_length, shape.head_size)
    has_window = any(mixer.has_window for mixers in shape.layers for mixer in mixers)
    if kernel == "none" or not has_window:
        return "none"
    if shape.position.build(shape.window_length, shape.num_heads, shape.model_width, rngs=nnx.Rngs(0)).changes_keys:
        return "none"
    problem = _problem(shape, dtype, kernel)
    if jax.process_count() > 1 and not np.all(multihost_utils.process_allgather(np.asarray(problem is None))):
        problem = problem or "another process refuses it"
    refused = f"the default is used instead: {problem}"
    print(f"attention kernel: {'checked on this device' if problem is None else refused}", file=sys.stderr, flush=True)
    return kernel if problem is None else "none"


def _problem(shape: Shape, dtype: str, kernel: str) -> str | None:
    """The reason in one line why the kernel can't be used; None if its results are the default's."""
    for with_dropout in (False, True)[: 1 + (shape.dropout_rate > 0)]:
        with jax.default_matmul_precision("highest"):
            exact = _results(shape, "none", dtype, "float32", with_dropout)
        default = _results(shape, "none", dtype, dtype, with_dropout)
        try:
            results = _results(shape, kernel, dtype, dtype, with_dropout)
        except Exception as error:  # whatever a compiler that refuses a kernel, or a device that stops in it, raises
            return f"it does not compile or run ({type(error).__name__}: {' '.join(str(error).split())[:200]})"
        for name, x in exact.items():
            for order in (2, np.inf):
                error, of_default = (np.linalg.norm(each[name] - x, order) for each in (results, default))
                allowed = MOST_TIMES * of_default + ERRORS[dtype] * np.linalg.norm(x, order)
                # Not `error > allowed`: NaN is refused.
                if not error <= allowed:
                    return f"the error of {name} is {error:.3g}, and should be at most {allowed:.3g}"
    return None


def _results(shape: Shape, kernel: str, rounded_to: str, dtype: str, with_dropout: bool) -> dict[str, np.ndarray]:
    """The outputs and the gradients of all inputs by name, flat; the inputs are numbers of the type `rounded_to`."""
    b, c, w = len(BLOCKS_READ), len(BLOCKS_READ[0]), shape.window_length
    module = WindowAttention(dataclasses.replace(shape, attention_kernel=kernel), rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(module)
    keys = iter(jax.random.split(jax.random.key(0), 99))

    def normal(*sizes: int) -> jax.Array:
        return jax.random.normal(next(keys), sizes)

    def rounded(x: jax.Array) -> jax.Array:
        return x.astype(rounded_to).astype(dtype)

    # Perturbed, so that no scale is 1 and no bias is 0.
    params = jax.tree.map(lambda x: x + 0.3 * normal(*x.shape), params)
    cached = (b, shape.num_heads, w, shape.head_size)
    inputs = {"tokens": rounded(normal(b, c * w, shape.model_width)), "parameters": params}
    inputs |= {"cached keys": rounded(unit(normal(*cached))), "cached values": rounded(normal(*cached))}
    cotangent = rounded(normal(b, c * w, shape.inner_width))
    read, dropout_key = jnp.asarray(BLOCKS_READ) * w, next(keys) if with_dropout else None

    # The time of products doesn't matter here, and a GPU's compiler takes longest to try their algorithms.
    @functools.partial(jax.jit, compiler_options={"xla_gpu_autotune_level": 0} if platform() == "gpu" else None)
    def run(inputs, cotangent):
        def attend(inputs):
            cache = TokenCache(inputs["cached keys"], inputs["cached values"], read[:, 0])
            module = nnx.merge(graphdef, inputs["parameters"])
            return module(inputs["tokens"], At(read, {}), cache, dropout_key)[0]

        outputs, pull_back = jax.vjp(attend, inputs)
        return {"outputs": outputs, "gradients": pull_back(cotangent)[0]}

    leaves, _ = jax.tree.flatten_with_path(run(inputs, cotangent))
    names = (jax.tree_util.keystr(path, simple=True, separator=" ") for path, _ in leaves)
    return {name: np.asarray(x, np.float32).ravel() for name, (_, x) in zip(names, leaves, strict=True)}
