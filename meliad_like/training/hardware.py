"""The peak rate and the memory of a device, with which the figures of a training are compared."""

import functools
import resource
import sys
import timeit

import jax
import jax.numpy as jnp

# Dense bfloat16 matrix products per chip as JAX counts devices, FLOP/s, from the vendors' data sheets.
DATASHEET_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}
MEASURED_SIZE = 2048  # Of the square matrices whose product is measured on other devices.


@functools.cache
def peak_flops(dtype: str) -> float:
    """The peak FLOP/s of one device for matrix products.

    Data sheets are for bfloat16; for another dtype, or a device that is not in the table, it is the best rate measured.
    """
    kind = jax.local_devices()[0].device_kind
    if dtype == "bfloat16" and kind in DATASHEET_FLOPS:
        return DATASHEET_FLOPS[kind]
    x = jax.device_put(jnp.ones((MEASURED_SIZE, MEASURED_SIZE), dtype), jax.local_devices()[0])
    product = jax.jit(jnp.matmul)
    # The first one is compiled.
    seconds = timeit.repeat(lambda: product(x, x).block_until_ready(), number=1, repeat=6)
    # Several simulated devices of one CPU share its rate.
    shared = jax.local_device_count() if jax.default_backend() == "cpu" else 1
    return 2 * MEASURED_SIZE**3 / min(seconds) / shared


def peak_memory_bytes() -> int:
    """The peak memory so far of the first device, or of the process if the device reports none."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    # Kibibytes on Linux, bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
