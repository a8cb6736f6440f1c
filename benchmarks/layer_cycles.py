r"""What one layer of a decoder, or a few, take on a TPU by its compiler's clock: forward and backward, on one chip.

    JAX_PLATFORMS=cpu python benchmarks/layer_cycles.py --topology=v4:2x2x1 \
        --gin_file=block_recurrent/slide_12l.gin --gin_file=option/bfloat16.gin

It needs the TPU compiler (libtpu), and compiles in a minute, a whole step in several. Two lanes of 4,096 tokens, with
dropout.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tpu_clock import read_clock

from meliad_like import config
from meliad_like.models.model import Model
from meliad_like.planning.topology import open_topology

TOPOLOGY = flags.DEFINE_string("topology", "v4:2x2x1", "A slice; one of its chips is used.")
GIN_FILE = flags.DEFINE_multi_string("gin_file", [], "Gin files of the model.")
GIN_PARAM = flags.DEFINE_multi_string("gin_param", [], "Bindings.")
LAYERS = flags.DEFINE_integer("layers", 1, "The number of layers.")
COSTLIEST = flags.DEFINE_integer("costliest", 20, "The number of instructions to list.")
LANES, TOKENS = 2, 4096
"""Those of a chip in the paper's runs."""


def main(_):
    topology = open_topology(TOPOLOGY.value)
    run = config.parse(GIN_FILE.value, [*GIN_PARAM.value, f"DecoderConfig.num_layers = {LAYERS.value}"])
    model = Model(run.model, 256)
    mesh = Mesh(np.array(topology.devices[:1]).reshape(1, 1, 1, 1), ("data", "fsdp", "tensor", "sequence"))

    def array(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    def read(params, carry, tokens, start, cotangent):
        def weighed(params):
            hidden, after = model.bind(params)(tokens, carry, start, jax.random.key(0))
            return jnp.sum((hidden * cotangent).astype(jnp.float32)), after

        return jax.grad(weighed, has_aux=True)(params)

    of_model = jax.tree.map(lambda x: array(x.shape, x.dtype), (model.abstract_params, model.abstract_carry(LANES)))
    blocks = TOKENS // run.model.window_length
    tokens, start = array((LANES, TOKENS), jnp.int32), array((LANES, blocks), bool)
    cotangent = array((LANES, TOKENS, run.model.model_width), jnp.bfloat16)
    with jax.set_mesh(mesh):
        compiled = jax.jit(read).lower(*of_model, tokens, start, cotangent).compile()
    clock = read_clock(compiled.as_text(), num_costliest=sys.maxsize)
    assert clock is not None
    in_loops = sum(one.cycles for one in clock.costliest if one.runs > 1)
    print(
        f"{clock.cycles / 1e6:.2f} million cycles, {in_loops / 1e6:.2f} of them in loops; without an estimate: "
        f"{clock.without_estimate}"
    )
    print(", ".join(f"{part} {cycles / 1e6:.2f}" for part, cycles in clock.parts.items()))
    memory = compiled.memory_analysis()
    assert memory is not None
    print(f"{memory.temp_size_in_bytes / 2**20:.0f} MiB of temporary memory")
    for one in clock.costliest[: COSTLIEST.value]:
        print(f"{one.cycles / 1e6:6.3f}  {one.part:16s} {one.name:32s} {one.source:32s} {one.result[:80]}")


if __name__ == "__main__":
    app.run(main)
