"""The kernels that compute a segment's attention and its recurrences, by the names that a config gives them."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array

from meliad_like.kernels import (
    convolution_tpu,
    memory_tpu,
    recurrence_gpu,
    recurrence_tpu,
    scan_gpu,
    scan_tpu,
    span,
    states_tpu,
    window_gpu,
    window_tpu,
)
from meliad_like.kernels.window_gpu import HEAD_SIZES, SMALLEST_TILE
from meliad_like.kernels.window_tpu_programs import ROWS
from meliad_like.layers.backend import platform
from meliad_like.layers.memory_search import MemorySearch, Operations

POSITIONS = "a DecoderConfig.position that is none or a bias"


class Kernel(NamedTuple):
    """The kernels of a platform, and where they run."""

    attend: Callable[..., Array]
    """Attention to the window, with the arguments of `window_tpu.attend_window_in_kernel`."""
    attend_states: Callable[..., Array] | None
    """Attention of and to states, as `states_tpu.attend_unit_in_kernel`; None: without a kernel."""
    attend_span: Callable[..., Array]
    """Attention to a span of tokens, as `span.attend_span_in_kernel`."""
    memory: Operations | None
    """A search of memories by bucket, and attention to the memories found; None: without a kernel."""
    platform: str | None
    """The platform; None: any."""
    fits: Callable[[int, int], bool]
    """Whether it can be compiled for this number of tokens in a window, states or buckets, and this head size."""
    needs: str
    """The platform, the sizes and the positions that the kernels need, for a message."""

    def runs(self, window_length: int, head_size: int) -> bool:
        """Whether the traced program's platform and these sizes allow it."""
        return self.platform in (None, platform()) and self.fits(window_length, head_size)


KERNELS = {
    "tpu": Kernel(
        window_tpu.attend_window_in_kernel,
        states_tpu.attend_unit_in_kernel,
        functools.partial(span.attend_span_in_kernel, run=span.splash_attention),
        memory_tpu.operations(),
        "tpu",
        lambda w, k: w % ROWS == 0 and k % ROWS == 0,
        f"a TPU, a window and heads of multiples of {ROWS}, and {POSITIONS}",
    ),
    "gpu": Kernel(
        window_gpu.attend_window_in_kernel,
        None,
        functools.partial(span.attend_span_in_kernel, run=span.cudnn_attention),
        None,
        "gpu",
        lambda w, k: w % SMALLEST_TILE == 0 and k in HEAD_SIZES,
        f"a GPU, a window that is a multiple of {SMALLEST_TILE}, heads of a size in {HEAD_SIZES}, and {POSITIONS}",
    ),
    "interpreted": Kernel(
        functools.partial(window_tpu.attend_window_in_kernel, interpret=True),
        functools.partial(states_tpu.attend_unit_in_kernel, interpret=True),
        functools.partial(span.attend_span_in_kernel, run=functools.partial(span.splash_attention, interpret=True)),
        memory_tpu.operations(interpret=True),
        None,
        lambda w, k: True,
        POSITIONS,
    ),
}

KernelsByName = dict[str, tuple[Callable[..., Any], Callable[..., bool]]]
"""Kernels by the name of a platform, each with a function of sizes: whether it can be compiled for them."""
RECURRENCES: KernelsByName = {
    "tpu": (recurrence_tpu.read_chunks_in_kernel, recurrence_tpu.fits),
    "gpu": (recurrence_gpu.read_chunks_in_kernel, recurrence_gpu.fits),
    "interpreted": (functools.partial(recurrence_gpu.read_chunks_in_kernel, interpret=True), lambda *_: True),
}
"""The kernels that read a segment's chunks, with the arguments of `recurrence_gpu.read_chunks_in_kernel`. The sizes are
the number of tokens of a block and of a chunk, the sizes of a key and a value, and whether decays are by channel."""
SCANS: KernelsByName = {
    "tpu": (scan_tpu.scan_in_kernel, scan_tpu.fits),
    "gpu": (scan_gpu.scan_in_kernel, scan_gpu.fits),
    "interpreted": (functools.partial(scan_gpu.scan_in_kernel, interpret=True), lambda *_: True),
}
"""The kernels that compute `scan_channels`. The sizes are the number of tokens of a block, and of channels."""
CONVOLUTIONS: KernelsByName = {"tpu": (convolution_tpu.convolve_in_kernel, convolution_tpu.fits)}
"""The kernels for the short convolution before a recurrence. The sizes are the number of tokens of a block, the length
of the filters, and the number of channels."""


def kernel_of_platform(window_length: int, head_size: int) -> str:
    """The name of the kernel for the platform and these sizes; `none` if there is none."""
    names = (name for name, kernel in KERNELS.items() if kernel.platform and kernel.runs(window_length, head_size))
    return next(names, "none")


def kernel_of_states(name: str, num_states: int, head_size: int) -> Callable[..., Array] | None:
    """The kernel for attention of and to this many states that belongs to an `attention_kernel`; None if none does."""
    kernel = KERNELS.get(name)
    return kernel.attend_states if kernel and kernel.fits(num_states, head_size) else None


def kernel_of_span(name: str, window_length: int) -> Callable[..., Array] | None:
    """The kernel for attention to a span, in blocks of this length, that belongs to an `attention_kernel`; None if none
    does."""
    return KERNELS[name].attend_span if name in KERNELS and window_length % ROWS == 0 else None


def kernel_of_memory(name: str, search: MemorySearch, num_neighbors: int, head_size: int) -> Operations | None:
    """The kernels for an external memory that belong to an `attention_kernel`; None if none do."""
    kernel = KERNELS.get(name)
    return kernel.memory if kernel and search == "bucketed" and kernel.fits(num_neighbors, head_size) else None


def kernel_of(kernels: KernelsByName, name: str, *sizes: Any) -> Callable[..., Any] | None:
    """The kernel that belongs to a `recurrence_kernel` and can be compiled for the sizes; None if none does."""
    kernel, fits = kernels.get(name, (None, None))
    return kernel if fits and fits(*sizes) else None
