"""Times layers and rules of flash-linear-attention at the sizes of `layer_time.py`, in the same way.

    pip install torch fla-core flash-linear-attention
    python benchmarks/layer_time_fla.py --output=fla.csv

Parameters and activations are bfloat16, except for what the layers keep in float32. Rules are the chunk functions on
random numbers of the mixers' shapes; Mamba-2's, which fla leaves to another package, is that of simple GLA.
"""

import importlib
import time
from collections.abc import Callable

import numpy as np
import pandas as pd
import torch  # type: ignore[import-not-found]
from absl import app, flags

LANES = flags.DEFINE_integer("lanes", 4, "Lanes.")
SEGMENT = flags.DEFINE_integer("segment", 4096, "Tokens of a segment.")
WIDTH = flags.DEFINE_integer("width", 1024, "Model width.")
HEADS = flags.DEFINE_integer("heads", 8, "Heads.")
HEAD_SIZE = flags.DEFINE_integer("head_size", 128, "Head size.")
REPEATS = flags.DEFINE_integer("repeats", 10, "Calls in a row, of which the mean time is taken.")
ROUNDS = flags.DEFINE_integer("rounds", 5, "Rounds, of which the median is taken.")
OUTPUT = flags.DEFINE_string("output", None, "CSV file for the figures.")


def layers() -> dict[str, Callable]:
    sizes = {"hidden_size": WIDTH.value, "num_heads": HEADS.value}

    def layer(module: str, name: str, **fields):
        return lambda: getattr(importlib.import_module(f"fla.layers.{module}"), name)(**sizes, **fields)

    return {
        "gated_delta_rule": layer("gated_deltanet", "GatedDeltaNet", head_dim=HEAD_SIZE.value, expand_v=1),
        "kimi_delta_attention": layer("kda", "KimiDeltaAttention", head_dim=HEAD_SIZE.value),
        "retention": layer("multiscale_retention", "MultiScaleRetention", expand_k=1.0, expand_v=2.0),
    }


def rules() -> dict[str, tuple[Callable, Callable]]:
    """Functions and their arguments."""
    b, n = LANES.value, SEGMENT.value

    def random(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    def unit(x):
        return torch.nn.functional.normalize(x.float(), dim=-1).bfloat16()

    def decay(*shape):
        return -0.1 * torch.exp(torch.randn(*shape, device="cuda"))

    def arguments(h, k, p, by_channel=False, corrected=False):
        made = [unit(random(b, n, h, k)), unit(random(b, n, h, k)), random(b, n, h, p)]
        made.append(decay(b, n, h, *[k] * by_channel))
        return made + [torch.rand(b, n, h, device="cuda", dtype=torch.bfloat16)] * corrected

    def rule(module, name, *sizes, **fields):
        return lambda: getattr(importlib.import_module(f"fla.ops.{module}"), name), lambda: arguments(*sizes, **fields)

    return {
        "lightning_attention": rule("simple_gla", "chunk_simple_gla", 8, 128, 128),
        "retention": rule("simple_gla", "chunk_simple_gla", 8, 128, 256),
        "mamba2": rule("simple_gla", "chunk_simple_gla", 32, 128, 64),
        "gated_delta_rule": rule("gated_delta_rule", "chunk_gated_delta_rule", 8, 128, 128, corrected=True),
        "kimi_delta_attention": rule("kda", "chunk_kda", 8, 128, 128, by_channel=True, corrected=True),
    }


def first(results):
    return results[0] if isinstance(results, tuple) else results


def timed(run: Callable[[], None]) -> list[float]:
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    times = []
    for _ in range(ROUNDS.value):
        begin = time.perf_counter()
        for _ in range(REPEATS.value):
            run()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin) / REPEATS.value)
    return times


def measure(name: str, what: str, call: Callable, inputs: list, parameters: list) -> list[dict]:
    rows, cotangent = [], torch.randn_like(first(call(*inputs)))

    def forward():
        with torch.no_grad():
            call(*inputs)

    def with_gradients():
        torch.autograd.grad(first(call(*inputs)), [*inputs, *parameters], cotangent, allow_unused=True)

    for kind, run in (("forward", forward), ("with gradients", with_gradients)):
        run()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        times = timed(run)
        peak = (torch.cuda.max_memory_allocated() - before) / 1e9
        row = {"mixer": name, "what": what, "kernel": "fla", "pass": kind}
        row |= {"ms, median": round(float(np.median(times)), 3), "ms, fastest": round(min(times), 3)}
        rows.append(row | {"temporaries, GB": round(peak, 3)})
        print(",".join(map(str, rows[-1].values())), flush=True)
    return rows


def main(_) -> None:
    import fla  # type: ignore[import-not-found]
    import triton  # type: ignore[import-not-found]

    print(
        f"{torch.cuda.get_device_name()}, fla {fla.__version__}, torch {torch.__version__}, triton {triton.__version__}"
    )
    rows = []
    for name, (function, make) in rules().items():
        try:
            inputs = [x.requires_grad_() for x in make()]
            rows += measure(name, "rule", function(), inputs, [])
        except Exception as error:  # whatever a kernel raises that does not compile
            print(name, "rule", type(error).__name__, " ".join(str(error).split())[:300], flush=True)
    for name, make in layers().items():
        try:
            layer = make().cuda().bfloat16()
            x = torch.randn(LANES.value, SEGMENT.value, WIDTH.value, device="cuda", dtype=torch.bfloat16)
            rows += measure(name, "layer", layer, [x.requires_grad_()], list(layer.parameters()))
        except Exception as error:
            print(name, "layer", type(error).__name__, " ".join(str(error).split())[:300], flush=True)
    if OUTPUT.value:
        pd.DataFrame(rows).to_csv(OUTPUT.value, index=False)


if __name__ == "__main__":
    app.run(main)
