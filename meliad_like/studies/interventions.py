"""Losses after the memory of a model has been exchanged, for studies.

Documents are read twice in segments of equal length. In the second reading, whose losses count, the memory is exchanged
at the beginning of every segment but a document's first, for one of the first reading, or an empty one. What is not
exchanged, such as the window, stays. So the loss of a token shows what the exchange costs at this distance.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int

from meliad_like.config import RunConfig
from meliad_like.data.batch import Batch
from meliad_like.data.readers import LanesReader
from meliad_like.data.split import Documents
from meliad_like.evaluation.perplexity import Evaluator, Losses, ReadingMode
from meliad_like.layers.lanes import choose_lanes, take_lanes
from meliad_like.mesh import lane_shards
from meliad_like.models.config import ModelConfig
from meliad_like.models.decoder import is_window
from meliad_like.models.model import Model

WINDOW = "window"
"""The part of a decoder's carry that is the caches of its attention to windows."""


def memory_of(model: Model) -> list[jax.ShapeDtypeStruct]:
    """The shapes of the floating-point arrays that a model carries from segment to segment for one text."""
    leaves = jax.tree.leaves(model.abstract_carry(1))
    return [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]


def cleared(model: ModelConfig) -> ModelConfig | None:
    """The same model, in which every segment begins with empty states; None if it has no states."""
    return dataclasses.replace(model, clear_states=True) if model.traits.states else None


def part_names(config: ModelConfig, carry: Any) -> list[str]:
    """The parts of a carry for segments that can be exchanged: of a decoder the window, and the memories of its mixers
    by their names; of other families the whole."""
    if not all(isinstance(layer, dict) for layer in carry.layers):
        return [] if config.traits.memory is None else [config.traits.memory]
    names = {}
    for layer in carry.layers:
        for name, one in layer.items():
            leaves = jax.tree.leaves(one, is_leaf=is_window)
            names |= {WINDOW if is_window(leaf) else name: None for leaf in leaves}
    return sorted(names, key=lambda name: name != WINDOW)


def exchange(config: ModelConfig, carry: Any, source: Any, names: Sequence[str]) -> Any:
    """A carry with the named parts of `source`, another carry, which may be from any place of any document, because
    mixers count the tokens of their memories themselves."""
    if set(names) == set(part_names(config, carry)):
        return source

    def choose(name, part, other):
        return other if (WINDOW if is_window(part) else name) in names else part

    layers = [
        {name: jax.tree.map(partial(choose, name), layer[name], other[name], is_leaf=is_window) for name in layer}
        for layer, other in zip(carry.layers, source.layers, strict=True)
    ]
    return carry._replace(layers=layers)


class Carries(NamedTuple):
    """The carries that an exchange needs."""

    disturbed: Any
    """The carry of the second reading, whose memory is exchanged."""
    now: Any
    """The carry of the first reading, after the last block that was read without padding."""
    earlier: Any
    """The carry of the first reading at the previous segment's beginning. It is empty if the document began there."""


class Kind(NamedTuple):
    """A kind of intervention."""

    description: str
    """The memory that comes instead."""
    memory: Callable[[Carries, Any, Any], Any]
    """The function (carries, undisturbed carry at the exchange, empty carry) -> the carry with the new memory."""
    frozen: bool = False
    """Whether nothing is written to the memory up to the end of the segment."""


KINDS = {
    "shuffled": Kind(
        "the memory of another document, of the one that the next lane has read last",
        lambda carries, carry, empty: take_lanes(carries.now, next_lanes(carries.now.position > 0)),
    ),
    "earlier": Kind(
        "the memory of the same document where the segment before began, which lacks what was read since",
        lambda carries, carry, empty: carries.earlier,
    ),
    "cleared": Kind("an empty memory, as before a document", lambda carries, carry, empty: empty),
    "frozen": Kind("its own memory, to which nothing is written any more", lambda carries, carry, empty: carry, True),
}


def next_lanes(filled: Bool[Array, " b"]) -> Int[Array, " b"]:
    """The next other lane of each lane, cyclically, that is `filled`; if none is, the next one."""
    b = len(filled)
    candidates = (jnp.arange(b)[:, None] + jnp.arange(1, max(b, 2))) % b
    return jnp.take_along_axis(candidates, jnp.argmax(filled[candidates], axis=1)[:, None], axis=1)[:, 0]


def losses_after(
    run: RunConfig,
    model: Model,
    params: Any,
    documents: Documents,
    mesh: Mesh,
    kind: str,
    parts: Sequence[str],
    every: int,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[np.ndarray]:
    """The loss of every target in nats, by document; up to target `every` of a document nothing is changed.

    `documents` are longer than `every`, the number of tokens from one intervention to the next, and at least two to be
    `shuffled`. `parts` are the names of the parts of the carry that are exchanged (`part_names`).
    """
    window, shards = model.config.window_length, lane_shards(mesh)
    # The evaluator has fewer lanes if documents are of unequal lengths; here the others' memories are needed.
    lanes = -(-min(max(run.data.num_lanes, 2), len(documents.lengths)) // shards) * shards

    def reader(documents: Documents, _: int) -> LanesReader:
        return LanesReader(documents, lanes, every, window, shuffle=False, epochs=1, whole_segments=True)

    step = partial(_step, KINDS[kind], tuple(parts), np.asarray(documents.lengths))
    reading_mode = ReadingMode(step, lambda module, b: Carries(*(module.init_carry(b) for _ in Carries._fields)))
    options = {"max_lanes": lanes, "loss_slice": run.training.loss_slice, "reading_mode": reading_mode}
    evaluator = Evaluator(model, documents, mesh, name=kind, segment_length=every, read=reader, **options)
    return evaluator.token_losses(params, on_progress)


def _step(kind: Kind, names, lengths, model: Model, loss_slice: int, params, carries: Carries, batch: Batch):
    """Reads a segment of every lane twice, block by block: undisturbed, and after the exchange."""
    module, config = model.bind(params), model.config
    begins = batch.start[:, 0]

    def with_memory(carry, source):
        """The carry with the memory of another one, except for documents that begin here."""
        return choose_lanes(begins, carry, exchange(config, carry, source, names))

    empty = module.init_carry(len(begins))
    undisturbed = choose_lanes(begins, empty, carries.now)
    changed = with_memory(carries.disturbed, kind.memory(carries, undisturbed, empty))
    # The last block of a document may end in padding, which must not become the memory of another document.
    whole = (batch.document >= 0) & (batch.position + config.window_length < jnp.asarray(lengths)[batch.document])

    def read(both, block):
        plain, disturbed = both
        inputs, targets, start, whole = block
        losses, carry = module.losses(inputs, targets, disturbed, start[:, None], slice_length=loss_slice)
        carry = with_memory(carry, disturbed) if kind.frozen else carry
        return (choose_lanes(whole, module(inputs, plain, start[:, None])[1], plain), carry), losses

    tokens = (rearrange(x, "b (c w) -> c b w", c=batch.start.shape[1]) for x in (batch.inputs, batch.targets))
    (now, disturbed), losses = jax.lax.scan(read, (carries.now, changed), (*tokens, batch.start.T, whole.T))
    losses = jax.tree.map(lambda x: rearrange(x, "c b w -> b (c w)"), losses)
    counted = batch.loss_mask, batch.document, batch.position
    return Carries(disturbed, now, undisturbed), Losses(losses.nats, losses.correct, *counted)
