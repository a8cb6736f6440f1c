"""The mixers' part in the check of kernels (`kernels/check.py`): the kernels that a decoder uses, and their trials.

Kernels of attention and kernels of recurrences are checked, and used, independently of each other.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from meliad_like.kernels.check import Computation, Trial, try_kernel
from meliad_like.kernels.registry import KERNELS, RECURRENCES, kernel_of_platform
from meliad_like.layers.backend import platform
from meliad_like.mixers.base import MIXERS, DecoderShape, KernelKind, LayerContext, Mixer
from meliad_like.mixers.sliding_window import WindowAttention

BLOCKS_READ = ((1000, 1001, 0), (0, 1, 2))
"""The number of blocks of the document before each block, in two lanes. In the first, a document continues, long enough
to have filled an external memory, and another begins; in the second, a document begins and continues. Outputs depend on
the update of the states by a block only if the document continues after it."""


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
    return try_kernel(kernel, dtype, kind, _trials(shape, dtype, kind, kernel), planned_for)


def _trials(shape: DecoderShape, rounded_to: str, kind: KernelKind, kernel: str) -> Iterator[Trial]:
    """The trials of the modules that use the kernel, of the window's also with dropout, on numbers of a type."""

    def with_kernel(name: str) -> DecoderShape:
        return dataclasses.replace(shape, **{f"{kind}_kernel": name})

    def trial(name: str, build: Callable[..., Mixer], with_dropout: bool = False) -> Trial:
        return Trial(
            name, lambda kernel, dtype: _computation(build, with_kernel(kernel), dtype, rounded_to, with_dropout)
        )

    if kind == "attention" and _has_window(shape):
        yield trial("the window", WindowAttention)
        if shape.dropout_rate > 0:
            yield trial("the window with dropout", WindowAttention, with_dropout=True)
    for mixer in dict.fromkeys(mixer for mixers in shape.layers for mixer in mixers):
        if mixer.has_kernel(with_kernel(kernel), kind):
            yield trial(MIXERS.name_of(mixer), mixer.build)


def _computation(
    build: Callable[..., Mixer], shape: DecoderShape, dtype: str, rounded_to: str, with_dropout: bool
) -> Computation:
    """A function that computes a module's outputs, its states after them and the gradients of all inputs, and another
    that makes these, numbers of the type `rounded_to`."""
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
