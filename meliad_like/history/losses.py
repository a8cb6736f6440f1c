"""The losses of the last tokens of many independent sequences, by one compiled program."""

import functools
import itertools
import math
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from meliad_like.layers.losses import token_losses
from meliad_like.layers.sharding import MESH_AXES_OF
from meliad_like.mesh import lane_sharding, replicated
from meliad_like.models.model import Model


class Sequence(NamedTuple):
    """Tokens that are read with no context before them."""

    tokens: Int[np.ndarray, " n"]
    num_targets: int
    """Number of the last tokens that are predicted; less than n, because nothing precedes the first."""


class TargetLosses:
    """Reads sequences in batches of one compiled shape, and returns the loss of each target.

    Shorter sequences are padded at their end, which does not change the losses of a causal model.
    """

    def __init__(
        self,
        model: Model,
        params: Any,
        mesh: Mesh,
        *,
        length: int,
        max_targets: int,
        batch_size: int,
        loss_slice: int = 1024,
    ):
        """
        Args:
            model: of any family.
            params: the model's parameters, on the mesh.
            mesh: where they are.
            length: tokens of the longest sequence.
            max_targets: largest number of targets of a sequence.
            batch_size: sequences that are read at once; rounded up to a multiple of the mesh's shards.
            loss_slice: tokens on a device whose logits exist at the same time.

        Raises:
            UserError: the model does not read sequences of this length.
        """
        shards = math.prod(mesh.shape[axis] for axis in MESH_AXES_OF["lanes"] or ())
        self._rows = -(-batch_size // shards)
        self._batch_size = self._rows * shards
        reading = model.for_separate_sequences(length)
        window = reading.config.window_length
        self._shape = (self._batch_size, -(-length // window) * window)
        self._lanes = lane_sharding(mesh, self._batch_size)
        self._params = params
        self.num_sequences = 0
        """Sequences read so far."""
        self.seconds = 0.0
        """Time spent on reading them, without compilation."""
        # The operations of a token without its logits are those with a vocabulary of size 0.
        hidden = Model(reading.config, 0).forward_flops_per_token
        logits = reading.forward_flops_per_token - hidden
        self.flops_per_sequence: float = self._shape[1] * hidden + max_targets * logits
        """Operations (`layers/flops.py`), padding included: all tokens are read, and targets have logits."""
        self._mesh = mesh
        self._losses = functools.partial(_losses, reading, max_targets, max(loss_slice // self._rows, 1))

    @functools.cached_property
    def _step(self) -> jax.stages.Compiled:
        """Compiled when it is needed: what is finished compiles nothing."""
        shapes = [
            jax.ShapeDtypeStruct(shape, np.int32, sharding=self._lanes) for shape in (self._shape, self._shape[:1])
        ]
        with jax.set_mesh(self._mesh):
            step = jax.jit(self._losses, out_shardings=replicated(self._mesh))
            return step.lower(self._params, *shapes).compile()

    @property
    def flops(self) -> float:
        """Operations of all sequences read so far."""
        return self.num_sequences * self.flops_per_sequence

    def __call__(self, sequences: Iterable[Sequence]) -> Iterator[Float[np.ndarray, " targets"]]:
        """The losses of each sequence's targets in nats, float32, in the order of the sequences.

        The sequences are taken from the iterable one batch ahead.
        """
        remaining = iter(sequences)
        while batch := list(itertools.islice(remaining, self._batch_size)):
            tokens, lengths = np.zeros(self._shape, np.int32), np.ones(self._shape[0], np.int32)
            for row, sequence in enumerate(batch):
                lengths[row] = len(sequence.tokens)
                tokens[row, : lengths[row]] = sequence.tokens
            step, began = self._step, time.perf_counter()
            nats = jax.device_get(step(self._params, *jax.device_put((tokens, lengths), self._lanes)))
            self.seconds += time.perf_counter() - began
            self.num_sequences += len(batch)
            for row, sequence in enumerate(batch):
                yield nats[row, nats.shape[1] - sequence.num_targets :]


def _losses(
    model: Model, num_targets: int, loss_slice: int, params: Any, tokens: Int[Array, "b n"], lengths: Int[Array, " b"]
) -> Float[Array, "b targets"]:
    """Losses of each sequence's last tokens; those of a short sequence's missing tokens are meaningless."""
    module = model.bind(params)
    b, n = tokens.shape
    start = jnp.zeros((b, n // model.config.window_length), bool).at[:, 0].set(True)
    hidden, _ = module(tokens, module.init_carry(b), start)
    places = lengths[:, None] - num_targets + jnp.arange(num_targets)
    targets = jnp.take_along_axis(tokens, jnp.maximum(places, 0), axis=1)
    before = jnp.take_along_axis(hidden, jnp.maximum(places - 1, 0)[..., None], axis=1)
    return token_losses(module, before, targets, loss_slice).nats
