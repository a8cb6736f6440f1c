r"""A kernel alone, compiled for a TPU: the time that takes, and its cycles by a profile or the compiler's schedule.

    LIBTPU_INIT_ARGS=--xla_jf_dump_static_llo_profile_to=cycles JAX_PLATFORMS=cpu \
        python benchmarks/kernel_cycles.py --topology=v6e:2x2; grep -A1 kernel cycles/*

It needs the TPU compiler (libtpu), and takes seconds; with a profile, which ends in an error after the kernels' figures
are written, 80. Two lanes of 4,096 tokens, 8 heads of 128, bfloat16, with dropout. The profile counts all branches, so
those of blocks that don't see the block before as well.

With --recurrence, the kernel of a recurrence of these sizes and that of its convolution, forward and backward, of the
same tokens; with --channels, the scan of a recurrence of this number of channels. These have no profile, but a schedule
for v4 as well: a line for each cycle of a run, unless it waits for memory. A run of the former is 128 tokens of four
heads, or two with decays by channel, or of a larger group; of the others 512 tokens of 512 channels. On v4 two cores
divide them.

    LIBTPU_INIT_ARGS="--xla_jf_dump_to=schedule --xla_jf_dump_llo_text=true" JAX_PLATFORMS=cpu \
        python benchmarks/kernel_cycles.py --topology=v4:2x2x1 --recurrence=8,8,128,128,0,1 --norm_epsilon=1e-6
    wc -l schedule/*_kernel*-final_hlo-static-per-bundle-utilization.txt
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from meliad_like.kernels.convolution_tpu import convolve_in_kernel
from meliad_like.kernels.recurrence_tpu import read_chunks_in_kernel
from meliad_like.kernels.scan_tpu import scan_in_kernel
from meliad_like.kernels.window_tpu import Projected, attend_window_in_kernel
from meliad_like.layers.linear_recurrence import Rule
from meliad_like.planning.topology import open_topology

TOPOLOGY = flags.DEFINE_string("topology", "v6e:2x2", "A slice; one of its chips is used.")
WINDOW = flags.DEFINE_integer("window_length", 512, "Tokens in a window.")
RECURRENCE = flags.DEFINE_list(
    "recurrence", [], "Groups, heads, sizes of a key and a value; 1 with decays by channel; 1: delta rule, 2: steps."
)
NORM = flags.DEFINE_float("norm_epsilon", None, "The epsilon of the norm of a recurrence's heads, if there is one.")
CHANNELS = flags.DEFINE_integer("channels", 0, "Channels of a recurrence of channels; 0: another kernel is compiled.")
LAYERS = flags.DEFINE_integer("layers", 1, "The number of layers of attention, one after the other.")
LANES, TOKENS, HEADS, HEAD_SIZE, RATE = 2, 4096, 8, 128, 0.1


def attended(projected, scale, bias, previous_valid, kept):
    for layer in range(LAYERS.value):
        query = attend_window_in_kernel(projected, scale[layer], bias[layer], previous_valid, kept, dropout_rate=RATE)
        projected = projected._replace(query=query)
    return jnp.sum(projected.query.astype(jnp.float32))


def read(rule, matrix, start, inputs, recent, filters):
    after, results = read_chunks_in_kernel(rule, matrix, start, 64, dtype=jnp.bfloat16, norm_epsilon=NORM.value)
    sums = [jnp.sum(x) for x in (after, results, convolve_in_kernel(inputs, recent, filters, start))]
    return sum(sums)


def lowered_recurrence(array):
    groups, heads, key_size, value_size, by_channel, strength = map(int, RECURRENCE.value)
    query, value = array(LANES, groups, TOKENS, key_size), array(LANES, heads, TOKENS, value_size)
    log_decay, factor = (array(LANES, heads, TOKENS, size) for size in (key_size if by_channel else 1, 1))
    rule = Rule(query, query, value, log_decay, *(factor if strength == i else None for i in (1, 2)))
    channels, start = 2 * groups * key_size + heads * value_size, array(LANES, TOKENS // WINDOW.value, dtype=bool)
    inputs = (array(LANES, n, channels, dtype=jnp.bfloat16) for n in (TOKENS, 3))
    convolution = *inputs, array(4, channels)
    return jax.jit(jax.value_and_grad(read, argnums=(0, 1, 3, 4, 5))).lower(
        rule, array(LANES, heads, value_size, key_size), start, *convolution
    )


def scanned(*arguments):
    return sum(map(jnp.sum, scan_in_kernel(*arguments)))


def lowered_scan(array):
    vectors, state = array(LANES, TOKENS, CHANNELS.value), array(LANES, CHANNELS.value)
    return jax.jit(jax.value_and_grad(scanned, argnums=(0, 1, 2))).lower(vectors, vectors, state)


def main(_):
    device = open_topology(TOPOLOGY.value).devices[0]
    sharding = NamedSharding(Mesh(np.array([[[[device]]]]), ("data", "fsdp", "tensor", "sequence")), PartitionSpec())

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    w, layers = WINDOW.value, LAYERS.value
    with jax.set_mesh(sharding.mesh):
        if CHANNELS.value:
            lowered = lowered_scan(array)
        else:
            lowered = lowered_recurrence(array) if RECURRENCE.value else lowered_window(array, w, layers)
    begin = time.perf_counter()
    lowered.compile()
    print(f"{TOPOLOGY.value}, windows of {w}, {layers} layers: compiled in {time.perf_counter() - begin:.1f} s")


def lowered_window(array, w, layers):
    lengths = (TOKENS, TOKENS, TOKENS, w, w)
    projected = Projected(*(array(LANES, n, HEADS * HEAD_SIZE, dtype=jnp.bfloat16) for n in lengths))
    of_heads = array(layers, HEADS), array(layers, HEADS, w)
    valid_and_kept = array(LANES, TOKENS // w, dtype=bool), array(HEADS, w, w, dtype=bool)
    return jax.jit(jax.grad(attended, argnums=(0, 1, 2))).lower(projected, *of_heads, *valid_and_kept)


if __name__ == "__main__":
    app.run(main)
