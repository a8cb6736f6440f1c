"""Shortformer's token-by-token evaluation against the baseline's, at the paper's sizes, in one run.

python benchmarks/token_by_token.py
python benchmarks/token_by_token.py --layers=4     # a quarter of both models

The baseline reads a window of 3,072 tokens for each predicted token; Shortformer compares one query with at most 1,024
keys. Parameters and tokens are random, which doesn't change the operations. Shortformer's tables 1 and 4 have 5 and 46
tokens a second on a V100, nine times as many.
"""

import dataclasses

import jax
import numpy as np
from absl import app, flags
from rich.console import Console

from meliad_like import config
from meliad_like.data.split import Documents
from meliad_like.mesh import MeshConfig, make_mesh, replicated
from meliad_like.models.model import Model
from meliad_like.studies import protocols
from meliad_like.tables import Table

LAYERS = flags.DEFINE_integer("layers", 16, "Layers of both models.")
WINDOWS = flags.DEFINE_integer("windows", 3, "Windows that the baseline reads, a token each.")
TOKENS = flags.DEFINE_integer("tokens", 512, "Tokens that Shortformer reads one by one, whole segments of 512.")

VOCABULARY_SIZE = 267_744  # of WikiText-103 by words


def one_document(length: int) -> Documents:
    """A split of one document of random tokens."""
    tokens = np.random.default_rng(0).integers(VOCABULARY_SIZE, size=length)
    number = np.zeros(1, int)
    return Documents(["random"], number + length, number, number, lambda _, start, stop: tokens[start:stop], number)


def measure(
    gin_file: str, protocol: protocols.ProtocolName, num_tokens: int, stride: int | None, mesh: jax.sharding.Mesh
):
    run = config.parse([gin_file])
    model = Model(dataclasses.replace(run.model, num_layers=LAYERS.value), VOCABULARY_SIZE)
    params = jax.jit(model.init, out_shardings=replicated(mesh))(jax.random.key(0))
    n = run.data.segment_length
    split = one_document(num_tokens + 1)
    return protocols.evaluate(model, params, split, protocol, segment_length=n, mesh=mesh, stride=stride)


def main(_):
    mesh = make_mesh(MeshConfig())
    length = config.parse(["shortformer/baseline.gin"]).data.segment_length
    windows = measure("shortformer/baseline.gin", "sliding", length + WINDOWS.value - 1, 1, mesh)
    single = measure("shortformer/shortformer.gin", "token_by_token", TOKENS.value, None, mesh)
    # The first window predicts all of its tokens at once.
    speeds = {
        "Baseline, L 3072": WINDOWS.value / windows.seconds,
        "Shortformer, L 512": single.num_tokens / single.seconds,
    }
    slowest = min(speeds.values())
    rows = [(name, f"{1 / speed:.3f}", f"{speed:.2f}", f"{speed / slowest:.1f}") for name, speed in speeds.items()]
    header = ("model", "seconds a token", "tokens per second", "times")
    Console(width=100).print(Table(f"{jax.devices()[0]}, {LAYERS.value} layers", header, rows).to_rich())


if __name__ == "__main__":
    app.run(main)
