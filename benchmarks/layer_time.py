"""Times one layer of each kind of mixer on this device, forward and with all gradients: norm, mixer, output projection.

    python benchmarks/layer_time.py --output=layers.csv
    JAX_PLATFORMS=cpu python benchmarks/layer_time.py --topology=h100:1    # only compiles: bytes, temporary memory

The sizes are those of the 150M-parameter models (`gin/size/medium_150m.gin`), with four lanes of 4,096 tokens. Layers
have no feed-forward network. `rule` is what a mixer calls `read_chunks` for, alone, on random numbers of its shapes.
`benchmarks/layer_time_fla.py` times flash-linear-attention's layers in the same way.
"""

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from absl import app, flags
from compiled_text import Module
from flax import nnx

from meliad_like.kernels.registry import RECURRENCES, kernel_of
from meliad_like.layers.backend import platform
from meliad_like.layers.linear_recurrence import Rule, read_chunks
from meliad_like.mesh import MeshConfig, make_mesh
from meliad_like.mixers.base import LayerContext
from meliad_like.models.decoder import DecoderConfig, DecoderLayer
from meliad_like.planning.topology import open_topology

KINDS = [
    *("sliding_window", "lightning_attention", "rg_lru", "retention", "mamba2", "gated_delta_rule"),
    "kimi_delta_attention",
]
MIXERS = flags.DEFINE_list("mixers", KINDS, "Names of mixers.")
LANES = flags.DEFINE_integer("lanes", 4, "Lanes.")
SEGMENT = flags.DEFINE_integer("segment", 4096, "Tokens of a segment.")
WINDOW = flags.DEFINE_integer("window", 512, "Tokens of a block.")
WIDTH = flags.DEFINE_integer("width", 1024, "Model width.")
HEADS = flags.DEFINE_integer("heads", 8, "Heads.")
HEAD_SIZE = flags.DEFINE_integer("head_size", 128, "Head size.")
KERNELS = flags.DEFINE_list(
    "kernels", ["none", "auto"], "Values of DecoderConfig.attention_kernel and recurrence_kernel."
)
DTYPE = flags.DEFINE_string("dtype", "bfloat16", "Type of the activations.")
REPEATS = flags.DEFINE_integer("repeats", 10, "Calls of a program in a row, of which the mean time is taken.")
ROUNDS = flags.DEFINE_integer("rounds", 5, "Rounds, of which the median is taken.")
JOBS = flags.DEFINE_integer("jobs", 4, "Programs compiled at the same time.", lower_bound=1)
RULES = flags.DEFINE_bool("rules", True, "Whether the rules are timed alone, too.")
TOPOLOGY = flags.DEFINE_string("topology", None, "A device that is not here, to compile for.")
OUTPUT = flags.DEFINE_string("output", None, "CSV file for the figures.")

SIZES = {
    # Groups, heads, and the sizes of keys and values of the 150M-parameter models; decays by channel, corrections.
    "lightning_attention": (8, 8, 128, 128, False, False),
    "retention": (8, 8, 128, 256, False, False),
    "mamba2": (1, 32, 128, 64, False, False),
    "gated_delta_rule": (8, 8, 128, 128, False, True),
    "kimi_delta_attention": (8, 8, 128, 128, True, True),
}
"""What `rule` is timed for."""


def layer_program(mixer: str, kernel: str):
    """A function of a layer's parameters and input that returns its output, and the shapes of its arguments."""
    config = DecoderConfig(
        num_layers=1,
        model_width=WIDTH.value,
        num_heads=HEADS.value,
        head_size=HEAD_SIZE.value,
        feedforward_width=4 * WIDTH.value,
        window_length=WINDOW.value,
        activation_dtype=DTYPE.value,
        pattern=(mixer,),
        attention_kernel=kernel,
        recurrence_kernel=kernel,
        dropout_rate=0.0,
    )
    chosen = config.on_this_platform()
    if kernel == "auto" and chosen == config:
        return None
    config = chosen

    def module():
        return DecoderLayer(config, 0, rngs=nnx.Rngs(0))

    graphdef, _ = nnx.split(nnx.eval_shape(module))
    b, n, c = LANES.value, SEGMENT.value, SEGMENT.value // WINDOW.value
    positions = np.broadcast_to(np.arange(c) * WINDOW.value, (b, c))

    def apply(params, x):
        layer = nnx.merge(graphdef, params)
        return layer(x, LayerContext(jnp.asarray(positions), {}), layer.init_carry(b, x.dtype), None)[0]

    def make():
        x = jax.random.normal(jax.random.key(1), (b, n, WIDTH.value)).astype(DTYPE.value)
        return nnx.state(module()), x

    return apply, make


def rule_program(mixer: str, kernel: str):
    g, h, k, p, by_channel, corrected = SIZES[mixer]
    b, n, w = LANES.value, SEGMENT.value, WINDOW.value
    start, chunk = jnp.zeros((b, n // w), bool), math.gcd(w, 64)
    read = read_chunks
    if kernel != "none":
        name = "gpu" if platform() == "gpu" else "none"
        in_kernel = kernel_of(RECURRENCES, name, w, chunk, k, p, by_channel)
        if in_kernel is None:
            return None
        read = functools.partial(in_kernel, dtype=jnp.dtype(DTYPE.value))

    def apply(rule, matrix):
        return read(rule, matrix, start, chunk)[1]

    def make():
        keys = iter(jax.random.split(jax.random.key(0), 9))

        def normal(*shape):
            return jax.random.normal(next(keys), shape)

        def unit(x):
            return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

        query, key, value = unit(normal(b, g, n, k)), unit(normal(b, g, n, k)), normal(b, h, n, p)
        log_decay = -0.1 * jnp.exp(normal(b, h, n, k if by_channel else 1))
        strength = jax.nn.sigmoid(normal(b, h, n, 1)) if corrected else None
        return Rule(query, key, value, log_decay, strength), normal(b, h, p, k)

    return apply, make


def forward(apply, arguments, cotangent):
    del cotangent
    return apply(*arguments)


def with_gradients(apply, arguments, cotangent):
    y, pull_back = jax.vjp(apply, *arguments)
    return y, pull_back(cotangent.astype(y.dtype))


PASSES: dict[str, Callable] = {"forward": forward, "with gradients": with_gradients}


def programs() -> Iterator[tuple[tuple[str, str, str], Callable, Callable]]:
    for mixer, kernel in itertools.product(MIXERS.value, KERNELS.value):
        found = layer_program(mixer, kernel)
        if found is not None:
            yield (mixer, "layer", kernel), *found
    for mixer, kernel in itertools.product(MIXERS.value, KERNELS.value):
        found = rule_program(mixer, kernel) if mixer in SIZES and RULES.value else None
        if found is not None:
            yield (mixer, "rule", kernel), *found


def milliseconds(program: Callable, apply: Callable, make: Callable) -> list[float]:
    """The mean time of a call, for each round."""
    arguments = jax.jit(make)()
    result = jax.eval_shape(apply, *arguments)
    cotangent = jax.random.normal(jax.random.key(3), result.shape).astype(result.dtype)
    jax.block_until_ready(program(arguments, cotangent))
    times = []
    for _ in range(ROUNDS.value):
        begin = time.perf_counter()
        for _ in range(REPEATS.value):
            result = program(arguments, cotangent)
        jax.block_until_ready(result)
        times.append(1e3 * (time.perf_counter() - begin) / REPEATS.value)
    return times


def main(_) -> None:
    device = open_topology(TOPOLOGY.value).devices[0] if TOPOLOGY.value else jax.devices()[0]
    mesh = make_mesh(MeshConfig(), [device])
    print(
        f"{device.device_kind}, jax {jax.__version__}, {LANES.value} x {SEGMENT.value} tokens, {DTYPE.value}",
        flush=True,
    )
    with jax.set_mesh(mesh):
        todo = [(name, *found, kind) for name, *found in programs() for kind in PASSES]

    def build(job):
        name, apply, make, kind = job
        begin = time.perf_counter()
        try:
            with jax.set_mesh(mesh):
                shapes = jax.eval_shape(make)
                cotangent = jax.eval_shape(apply, *shapes)
                program = jax.jit(functools.partial(PASSES[kind], apply)).lower(shapes, cotangent).compile()
        except Exception as error:  # whatever a compiler raises
            print(*name, kind, type(error).__name__, " ".join(str(error).split())[:300], flush=True)
            return None
        return program, time.perf_counter() - begin

    with ThreadPoolExecutor(JOBS.value) as pool:
        built = list(pool.map(build, todo))
    rows = []
    for (name, apply, make, kind), one in zip(todo, built, strict=True):
        if one is None:
            continue
        program, compile_seconds = one
        row = dict(zip(("mixer", "what", "kernel"), name, strict=True)) | {"pass": kind}
        if TOPOLOGY.value:
            row |= {"moved, GB": round(Module(program.as_text()).bytes_moved() / 1e9, 3)}
        else:
            times = milliseconds(program, apply, make)
            row |= {"ms, median": round(float(np.median(times)), 3), "ms, fastest": round(min(times), 3)}
        memory = program.memory_analysis()
        assert memory is not None
        temporary = memory.temp_size_in_bytes / 1e9
        row |= {"temporaries, GB": round(temporary, 3), "compiled in s": round(compile_seconds, 1)}
        rows.append(row)
        print(",".join(map(str, row.values())), flush=True)
    if OUTPUT.value:
        pd.DataFrame(rows).to_csv(OUTPUT.value, index=False)


if __name__ == "__main__":
    app.run(main)
