"""Speed of scoring the gains of spans (equation 2), one at a time and in batches, which give the same numbers.

    python benchmarks/history_scoring.py

A random model, whose size the options give, scores candidates of one document for several strides. Compilation is not
counted; the two methods take turns, and the best round of each counts.
"""

import argparse
import functools
import time

import jax
import numpy as np

from meliad_like.families.pretrained.config import PretrainedConfig
from meliad_like.history.gains import Candidates, SpanGains, TargetLosses
from meliad_like.history.settings import HistoryConfig
from meliad_like.history.spans import Layout, candidates, is_scored, strides
from meliad_like.mesh import MeshConfig, make_mesh
from meliad_like.models.model import Model

VOCABULARY_SIZE = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--window", type=int, default=64, help="the history is half of it, spans and strides an eighth")
    parser.add_argument("--spans", type=int, default=256, help="that are scored in a round")
    parser.add_argument("--batch_sizes", default="1,8,32,128")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    k, d = arguments.window, arguments.width
    config = HistoryConfig(window_length=k, history_length=k // 2, span_length=k // 8, stride=k // 8, separator="")
    model = Model(
        PretrainedConfig(
            num_layers=arguments.layers,
            model_width=d,
            num_heads=2,
            num_key_value_heads=2,
            head_size=d // 2,
            feedforward_width=4 * d,
            max_positions=k,
            window_length=k,
        ),
        VOCABULARY_SIZE,
    )
    params = model.init(jax.random.key(0))
    mesh = make_mesh(MeshConfig(data=1), jax.devices()[:1])
    document = np.random.default_rng(0).integers(0, VOCABULARY_SIZE, size=16 * k).astype(np.int32)
    requests, left = [], arguments.spans
    for stride in reversed([stride for stride in strides(len(document), config) if is_scored(stride, config)]):
        ends = candidates(stride, config)[:left]
        requests.append(Candidates(document, stride, ends))
        left -= len(ends)
        if not left:
            break
    assert left == 0, "the document has too few candidates"

    sizes = [int(size) for size in arguments.batch_sizes.split(",")]
    scorers = {
        size: SpanGains(functools.partial(TargetLosses, model, params, mesh, batch_size=size), Layout(config, None))
        for size in sizes
    }
    seconds, by_size = dict.fromkeys(sizes, np.inf), {}
    for _ in range(arguments.rounds):
        for size, gains in scorers.items():
            began = time.perf_counter()
            by_size[size] = np.concatenate(list(gains(requests)))
            seconds[size] = min(seconds[size], time.perf_counter() - began)
    first = sizes[0]
    print(f"{arguments.spans} spans of {config.span_length} tokens with {config.recent_length} recent ones")
    for size in sizes:
        difference = np.abs(by_size[size] - by_size[first]).max()
        print(
            f"{size:4} at once: {arguments.spans / seconds[size]:9,.0f} spans a second, "
            f"{seconds[first] / seconds[size]:5.1f} times as fast; largest difference {difference:.1e} nats",
            flush=True,
        )


if __name__ == "__main__":
    main()
