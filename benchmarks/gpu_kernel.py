"""Checks and times the attention kernel for GPUs, at the paper's sizes, with several tilings.

    python benchmarks/gpu_kernel.py

It needs one GPU and one to two minutes. Without a GPU, but with JAX's CUDA plugin, it compiles the kernel for
the GPU of a target config of XLA (xla/backends/gpu/target_config/specs), and says how much memory it takes and moves:

    python benchmarks/gpu_kernel.py --target_config=h100_sxm.txtpb
"""

import concurrent.futures
import functools
import re
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from einops import rearrange
from jax.experimental import topologies

from meliad_like.kernels.window_gpu import attend_window_in_kernel
from meliad_like.kernels.window_gpu_programs import Tiling, Tilings
from meliad_like.kernels.window_tpu import Projected
from meliad_like.layers.attention import attend_window, unit
from meliad_like.layers.basic import kept_by_dropout, multiplier_of
from meliad_like.mesh import MeshConfig, make_mesh, replicated

LANES = flags.DEFINE_integer("lanes", 4, "Lanes.")
BLOCKS = flags.DEFINE_integer("blocks", 8, "Blocks of a segment.")
WINDOW = flags.DEFINE_integer("window", 512, "Window length.")
HEADS = flags.DEFINE_integer("heads", 8, "Heads.")
HEAD_SIZE = flags.DEFINE_integer("head_size", 128, "Head size.")
DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Type of the timed activations.")
DROPOUT = flags.DEFINE_bool("dropout", False, "Whether the programs with several tilings have dropout.")
CHECK = flags.DEFINE_bool("check", True, "Whether the check at the start of a program runs, too.")
REPEATS = flags.DEFINE_integer("repeats", 20, "Calls of a program in a row, of which the mean time is taken.")
TARGET = flags.DEFINE_string("target_config", None, "Text of a GpuTargetConfigProto: compile for this GPU alone.")

TILINGS = {
    "forward": [
        *(Tiling(64, 64, 4, 1), Tiling(64, 64, 4, 2), Tiling(64, 64, 4, 3), Tiling(64, 64, 8, 1), Tiling(64, 32, 4, 3)),
        *(Tiling(128, 64, 4, 2), Tiling(128, 64, 8, 1), Tiling(128, 64, 8, 2), Tiling(128, 128, 8, 2)),
    ],
    "of_queries": [
        *(Tiling(64, 64, 4, 1), Tiling(64, 64, 4, 2), Tiling(64, 64, 8, 1), Tiling(64, 64, 8, 2), Tiling(32, 32, 4, 2)),
    ],
    "of_keys": [
        *(Tiling(64, 64, 4, 1), Tiling(64, 64, 4, 2), Tiling(64, 64, 8, 1), Tiling(64, 64, 8, 2), Tiling(32, 64, 4, 2)),
        *(Tiling(64, 128, 8, 1), Tiling(64, 128, 8, 2)),
    ],
}
"""The tilings of each of the three kernels."""
RATE = 0.1
"""The rate of dropout."""


def default_attention(projected, scale, bias, valid, kept):
    h, w = bias.shape
    heads = [rearrange(x, "b (c w) (h k) -> b c h w k", h=h, w=w) for x in projected]
    query, key, value, before_key, before_value = heads
    query, key = (unit(query).astype(jnp.float32) * scale[:, None, None]).astype(query.dtype), unit(key)
    previous_key = jnp.concatenate([before_key, key[:, :-1]], axis=1)
    previous_value = jnp.concatenate([before_value, value[:, :-1]], axis=1)
    mixed = attend_window(query, key, value, previous_key, previous_value, bias, valid, multiplier_of(kept, RATE))
    return rearrange(mixed, "b c h w k -> b (c w) (h k)")


def forward(attend, arguments, others, cotangent):
    return attend(*arguments, *others)


def with_query_gradients(attend, arguments, others, cotangent):
    """The results, and the gradients of what one kernel computes: queries, scale and bias."""
    mixed, (gradients, *of_others) = with_gradients(attend, arguments, others, cotangent)
    return mixed, gradients.query, of_others


def with_gradients(attend, arguments, others, cotangent):
    mixed, pull_back = jax.vjp(lambda *arguments: attend(*arguments, *others), *arguments)
    gradients, *of_others = pull_back(cotangent)
    # Those of the block before are not asked for, as in training.
    return mixed, (gradients._replace(before_key=None, before_value=None), *of_others)


PARTS = {"forward": forward, "of_queries": with_query_gradients, "of_keys": with_gradients}


def programs():
    """The functions to compile by what they compute and with what; of the same part, all have the same results."""
    for part, function in PARTS.items():
        yield (part, "default"), functools.partial(function, default_attention)
        for tiling in TILINGS[part]:
            kernel = functools.partial(
                attend_window_in_kernel, dropout_rate=RATE, tilings=Tilings()._replace(**{part: tiling})
            )
            yield (part, str(tiling)), functools.partial(function, kernel)


def inputs(dropout: bool):
    b, n, w, h, inner = LANES.value, BLOCKS.value * WINDOW.value, WINDOW.value, HEADS.value, HEAD_SIZE.value
    inner, keys = h * inner, iter(jax.random.split(jax.random.key(0), 16))

    def normal(*shape, dtype=DTYPE.value):
        return jax.random.normal(next(keys), shape).astype(dtype)

    projected = Projected(*(normal(b, length, inner) for length in (n, n, n, w, w)))
    projected = projected._replace(before_key=unit(projected.before_key.reshape(b, w, h, -1)).reshape(b, w, inner))
    arguments = projected, 4 + normal(h, dtype="float32"), normal(h, w, dtype="float32")
    kept = kept_by_dropout(next(keys), RATE, (h, w, w)) if dropout else None
    return arguments, (jax.random.bernoulli(next(keys), 0.9, (b, BLOCKS.value)), kept), normal(b, n, inner)


def compiled(function, arguments):
    """A compiled program, or the error in a line."""
    try:
        return jax.jit(function).lower(*arguments).compile()
    except Exception as error:  # whatever a compiler raises
        return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"


def milliseconds(program, arguments) -> float:
    jax.block_until_ready(program(*arguments))
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(REPEATS.value):
            result = program(*arguments)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - begin) / REPEATS.value)
    return 1e3 * float(np.median(times))


def largest_difference(actual, expected) -> float:
    """The largest of the arrays' differences, each as a share of the array's norm."""
    pairs = [[np.asarray(x, np.float32) for x in pair] for pair in zip(*map(jax.tree.leaves, (actual, expected)))]
    return max(float(np.linalg.norm(x - y) / np.linalg.norm(y)) for x, y in pairs)


def time_programs(functions: dict[tuple[str, str], Callable], dropout: bool) -> dict[tuple[str, str], float]:
    """The milliseconds of each program that runs, by part and name; the first of a part has the expected results."""
    begin, arguments = time.perf_counter(), inputs(dropout)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        programs = list(pool.map(functools.partial(compiled, arguments=arguments), functions.values()))
    print(f"dropout {dropout}: {len(functions)} compilations, {time.perf_counter() - begin:.0f} s", flush=True)
    expected, times = {}, {}
    for (part, name), program in zip(functions, programs):
        try:
            if isinstance(program, str):
                raise RuntimeError(program)
            result = program(*arguments)
            expected.setdefault(part, result)
            times[part, name] = milliseconds(program, arguments)
            figures = f"{times[part, name]:8.3f} ms  {temporaries(program):6.3f} GB of temporaries"
            print(f"{part:12} {name:62} {figures}  {largest_difference(result, expected[part]):.1e}", flush=True)
        except Exception as error:  # whatever a device raises
            print(f"{part:12} {name:62} {' '.join(str(error).split())[:200]}", flush=True)
    return times


def fastest_tilings() -> Tilings:
    """The tiling of each kernel that is the fastest on this GPU."""
    times = time_programs(dict(programs()), DROPOUT.value)
    fastest = Tilings()
    for part, tilings in TILINGS.items():
        timed = [tiling for tiling in tilings if (part, str(tiling)) in times]
        if timed:
            fastest = fastest._replace(**{part: min(timed, key=lambda tiling: times[part, str(tiling)])})
    print(f"the fastest: {fastest}", flush=True)
    return fastest


def time_layer(tilings: Tilings) -> None:
    """Times a layer's attention by default and with the kernel, with and without dropout."""
    kernel = functools.partial(attend_window_in_kernel, dropout_rate=RATE, tilings=tilings)
    attends = {"default": default_attention, "kernel": kernel}
    functions = {
        (part, name): functools.partial(PARTS[part], attend)
        for part in ("forward", "of_keys")
        for name, attend in attends.items()
    }
    for dropout in (False, True):
        time_programs(functions, dropout)


def check(dtype: str) -> None:
    """The check at the start of a program, with and without dropout."""
    from meliad_like.mixers.kernel_check import kernel_that_works
    from meliad_like.models.decoder import DecoderConfig

    sizes = {"num_heads": HEADS.value, "head_size": HEAD_SIZE.value, "window_length": WINDOW.value}
    config = DecoderConfig(num_layers=1, model_width=1024, dropout_rate=0.1, **sizes)
    begin = time.perf_counter()
    kernel = kernel_that_works(config.shape, dtype, "attention")
    print(f"check in {dtype}: {kernel}, {time.perf_counter() - begin:.0f} s", flush=True)


def temporaries(program) -> float:
    return program.memory_analysis().temp_size_in_bytes / 1e9


BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "f64": 8}
FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")


def bytes_moved(text: str) -> dict[str, int]:
    """The bytes of operands and results of each instruction of a compiled program, but not of what loops repeat."""
    sizes, moved = {}, {}
    for line in re.split(r"\n(?=ENTRY)", text)[1].splitlines()[1:]:
        parts = re.match(r"\s*(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*?)\)", line)
        if parts is None:
            continue
        name, shapes, kind, operands = parts.groups()
        arrays = re.findall(r"(\w+)\[([\d,]*)\]", shapes)
        sizes[name] = sum(BYTES.get(d, 0) * int(np.prod([int(x) for x in s.split(",") if x])) for d, s in arrays)
        if kind not in FREE:
            moved[name] = sizes[name] + sum(sizes.get(x, 0) for x in re.findall(r"%([\w.-]+)", operands))
    return moved


def compile_for(target: str) -> None:
    """Compiles for a GPU that is not there."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x1")
    # Pallas asks the mesh for the GPU's kind.
    mesh = make_mesh(MeshConfig(), topology.devices)
    arguments = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated(mesh)),
        jax.eval_shape(lambda: inputs(DROPOUT.value)),
    )
    jax.set_mesh(mesh)
    for (part, name), function in programs():
        program = compiled(function, arguments)
        if isinstance(program, str):
            print(f"{part:12} {name:62} {program}", flush=True)
            continue
        moved = bytes_moved(program.as_text())
        figures = f"{temporaries(program):6.3f} GB of temporaries, {sum(moved.values()) / 1e9:6.3f} GB moved"
        print(f"{part:12} {name:62} {figures}", flush=True)


def main(_) -> None:
    if TARGET.value:
        compile_for(Path(TARGET.value).read_text())
        return
    device = jax.devices()[0]
    print(f"{device.device_kind}, jax {jax.__version__}, {LANES.value} lanes, {DTYPE.value}", flush=True)
    tilings = fastest_tilings()
    for dtype in ("bfloat16", "float32") * CHECK.value:
        check(dtype)
    time_layer(tilings)


if __name__ == "__main__":
    app.run(main)
