r"""The window's attention kernel alone, compiled for a TPU: the time that takes, and its cycles by a profile.

    LIBTPU_INIT_ARGS=--xla_jf_dump_static_llo_profile_to=cycles JAX_PLATFORMS=cpu \
        python benchmarks/kernel_cycles.py --topology=v6e:2x2; grep -A1 kernel cycles/*

It needs the TPU compiler (libtpu), and takes seconds; with a profile, which ends in an error after the kernels' figures
are written, 80. Two lanes of 4,096 tokens, 8 heads of 128, bfloat16, with dropout. The profile counts all branches, so
those of blocks that don't see the block before as well.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meliad_like.kernels.window_tpu import Projected, attend_window_in_kernel
from meliad_like.planning.topology import open_topology

TOPOLOGY = flags.DEFINE_string("topology", "v6e:2x2", "A slice; one of its chips is used.")
WINDOW = flags.DEFINE_integer("window_length", 512, "Tokens in a window.")
LAYERS = flags.DEFINE_integer("layers", 1, "The number of layers of attention, one after the other.")
LANES, TOKENS, HEADS, HEAD_SIZE, RATE = 2, 4096, 8, 128, 0.1


def attended(projected, scale, bias, previous_valid, kept):
    for layer in range(LAYERS.value):
        query = attend_window_in_kernel(projected, scale[layer], bias[layer], previous_valid, kept, dropout_rate=RATE)
        projected = projected._replace(query=query)
    return jnp.sum(projected.query.astype(jnp.float32))


def main(_):
    device = open_topology(TOPOLOGY.value).devices[0]
    sharding = NamedSharding(Mesh(np.array([[[[device]]]]), ("data", "fsdp", "tensor", "sequence")), PartitionSpec())

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    w, layers = WINDOW.value, LAYERS.value
    lengths = (TOKENS, TOKENS, TOKENS, w, w)
    projected = Projected(*(array(LANES, n, HEADS * HEAD_SIZE, dtype=jnp.bfloat16) for n in lengths))
    of_heads = array(layers, HEADS), array(layers, HEADS, w)
    valid_and_kept = array(LANES, TOKENS // w, dtype=bool), array(HEADS, w, w, dtype=bool)
    lowered = jax.jit(jax.grad(attended, argnums=(0, 1, 2))).lower(projected, *of_heads, *valid_and_kept)
    begin = time.perf_counter()
    lowered.compile()
    print(f"{TOPOLOGY.value}, windows of {w}, {layers} layers: compiled in {time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    app.run(main)
