"""The external memory: results of a search, its memory use, and the memories that must never be found."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import mixer_of, with_mixer
from ways import V, W, begin, read, starts, tokens_of

from meliad_like.errors import UserError
from meliad_like.kernels import memory_tpu
from meliad_like.layers import memory_search
from meliad_like.layers.lanes import choose_carry, with_backup
from meliad_like.layers.memory_search import (
    Hits,
    Lookup,
    Memory,
    Operations,
    mix,
    products,
    read_segment,
    remember,
    remember_block,
    search,
)
from meliad_like.mixers.external_memory import ExternalMemory
from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.model import Model

B, H, T, M, K, J = 2, 3, 5, 48, 8, 4
CONFIG = with_mixer(
    DecoderConfig(
        num_layers=2,
        model_width=16,
        num_heads=2,
        head_size=8,
        feedforward_width=16,
        window_length=W,
    ),
    ExternalMemory(num_slots=4 * W, num_neighbors=3),
    (0,),
)


def memorizing(**changes):
    return with_mixer(CONFIG, dataclasses.replace(mixer_of(CONFIG, ExternalMemory), **changes), (0,))


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def scores_of(query, key, filled):
    scores = np.einsum("bhtk,bhsk->bhts", query, key)
    return np.where(np.arange(key.shape[2]) < np.asarray(filled)[:, None, None, None], scores, -np.inf)


# One piece, pieces that divide the memory, and a last one that overlaps.
@pytest.mark.parametrize("piece", [2048, 12, 20])
@pytest.mark.parametrize("filled", [(M, 2 * M), (2, 0), (13, 31)])
def test_exact_search_is_brute_force(monkeypatch, piece, filled):
    monkeypatch.setattr(memory_search, "PIECE", piece)
    query, key = normal(B, H, T, K), normal(B, H, M, K, seed=1)
    found = search(query, key, jnp.array(filled), J, "exact")
    scores = scores_of(query, key, filled)
    expected = np.argsort(-scores, axis=-1, kind="stable")[..., :J]
    valid = np.isfinite(np.take_along_axis(scores, expected, axis=-1))
    np.testing.assert_array_equal(found.score > -np.inf, valid)
    np.testing.assert_array_equal(np.where(valid, found.slot, -1), np.where(valid, expected, -1))


@pytest.mark.parametrize("piece", [2048, 12, 20])
@pytest.mark.parametrize("filled", [(M, 2 * M), (2, 0), (13, 31)])
def test_bucketed_search_finds_the_best_of_each_bucket(monkeypatch, piece, filled):
    monkeypatch.setattr(memory_search, "PIECE", piece)
    query, key = normal(B, H, T, K), normal(B, H, M, K, seed=1)
    found = search(query, key, jnp.array(filled), J, "bucketed")
    scores = scores_of(query, key, filled).reshape(B, H, T, M // J, J)
    expected = scores.argmax(axis=-2) * J + np.arange(J)
    valid = np.isfinite(scores.max(axis=-2))
    np.testing.assert_array_equal(found.score > -np.inf, valid)
    np.testing.assert_array_equal(np.where(valid, found.slot, -1), np.where(valid, expected, -1))


def test_slots_are_of_their_lane_and_head():
    query, weights, stored = normal(B, H, T, K), normal(B, H, T, J, seed=1), normal(B, H, M, K, seed=2)
    slot = np.random.default_rng(3).integers(0, M, (B, H, T, J))
    recalled = np.zeros((B, H, T, J, K), np.float32)
    for b, h, t, j in np.ndindex(slot.shape):
        recalled[b, h, t, j] = stored[b, h, slot[b, h, t, j]]
    expected = np.einsum("bhtk,bhtjk->bhtj", query, recalled), np.einsum("bhtj,bhtjk->bhtk", weights, recalled)
    actual = products(query, stored, jnp.asarray(slot)), mix(weights, stored, jnp.asarray(slot))
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_no_memory_is_zero():
    nothing = Hits(np.zeros((1, 1, 2, J), np.int32), np.full((1, 1, 2, J), -np.inf, np.float32))
    for mask_empty in (True, False):
        result = Lookup(J, "exact", mask_empty).attend(nothing, normal(1, 1, M, K))
        np.testing.assert_array_equal(result, 0)


def test_a_memory_is_a_ring():
    stored = Memory(jnp.zeros((2, 1, 4, 1)), jnp.zeros((2, 1, 4, 1)))
    key = jnp.arange(1.0, 7).reshape(2, 1, 3, 1)
    positions, keep = jnp.array([[3, 4, 5], [0, 1, 2]]), jnp.array([[True] * 3, [False, True, True]])
    new = remember(stored, key, -key, positions, keep)
    np.testing.assert_array_equal(new.key[:, 0, :, 0], [[2, 3, 0, 1], [0, 5, 6, 0]])
    np.testing.assert_array_equal(new.value, -new.key)


def test_a_block_is_written_where_its_tokens_are():
    stored = Memory(jnp.asarray(normal(2, H, 6, K)), jnp.asarray(normal(2, H, 6, K, seed=1)))
    key, position, keep = normal(2, H, 3, K, seed=2), jnp.array([15, 6]), jnp.array([True, False])
    tokens = position[:, None] + jnp.arange(3)
    expected = remember(stored, key, -key, tokens, jnp.broadcast_to(keep[:, None], tokens.shape))
    actual = remember_block(stored, Memory(key, -key), position, keep)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_search_never_holds_the_scores_of_all_slots():
    """At 64k slots and the paper's 512 queries of 8 heads: what the compiler reserves, against 1 GB of scores."""

    def find(query, key, filled):
        return search(query, key, filled, 128, "exact")

    shapes = ((1, 8, 512, 128), (1, 8, 65_536, 128))
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    compiled = jax.jit(find).lower(*arguments, jax.ShapeDtypeStruct((1,), jnp.int32)).compile()
    scores = 8 * 512 * 65_536 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < scores / 5


DEFAULT, KERNELS = Operations(), memory_tpu.operations(interpret=True)
# Document positions before each block of two lanes: one that continues and then ends, and one that begins later. With
# six blocks of four tokens and a memory of 16, blocks are replaced within the segment.
POSITIONS = jnp.array([[20, 24, 28, 32, 0, 4], [8, 0, 4, 8, 12, 16]])


def read_plainly(lookup, blocks_per_turn, query, key, value, memory, position):
    """The same with the weights of all memories, and without a gradient of its own."""
    results, (b, c, h, w, _), (*_, m, _) = [], query.shape, memory.key.shape
    for turn in np.split(np.arange(c), c // blocks_per_turn):
        first, last = position[:, turn[:1]], position[:, turn[-1:]]
        scores = jnp.einsum("buhtk,bhsk->buhts", query[:, turn], memory.key)
        usable = (position[:, turn] == first + w * np.arange(len(turn)))[:, :, None, None, None]
        usable &= np.arange(m) < first[:, :, None, None, None]
        usable_scores = jnp.where(usable, scores, -jnp.inf)
        if lookup.kind == "exact":
            lowest = jnp.sort(usable_scores)[..., -lookup.count, None]
        else:
            by_bucket = usable_scores.reshape(b, len(turn), h, w, -1, lookup.count)
            lowest = jnp.tile(jnp.max(by_bucket, axis=-2), m // lookup.count)
        chosen = usable & (usable_scores >= lowest)
        weights = jnp.where(chosen, jnp.exp(scores), 0)
        total = jnp.sum(weights, axis=-1, keepdims=True)
        total += 0 if lookup.mask_empty else lookup.count - jnp.sum(chosen, axis=-1, keepdims=True)
        results.append(jnp.einsum("buhts,bhsk->buhtk", weights, memory.value) / jnp.where(total > 0, total, 1))
        for u in turn:
            keep = position[:, u] == last[:, 0] - (turn[-1] - u) * w
            positions, keep = position[:, u, None] + np.arange(w), jnp.repeat(keep[:, None], w, axis=1)
            memory = remember(memory, key[:, u], value[:, u], positions, keep)
    return jnp.concatenate(results, axis=1), memory


# In the second case no whole part divides the queries of a run.
@pytest.mark.parametrize(("blocks_per_turn", "mask_empty", "part"), [(1, True, 1), (3, False, 5), (6, True, 1)])
@pytest.mark.parametrize(("kind", "operations"), [("exact", DEFAULT), ("bucketed", DEFAULT), ("bucketed", KERNELS)])
def test_a_segment_is_read_as_with_all_weights(kind, operations, blocks_per_turn, mask_empty, part, monkeypatch):
    for name, size in (("SLOTS", 8), ("QUERIES", 2), ("PART", part)):
        monkeypatch.setattr(memory_tpu, name, size)
    lookup, w, m = Lookup(J, kind, mask_empty, operations), 4, 16
    query, key, value, cotangent = (jnp.asarray(normal(B, 6, H, w, K, seed=seed)) for seed in range(4))
    memory = Memory(*(jnp.asarray(normal(B, H, m, K, seed=seed)) for seed in (4, 5)))
    outcomes = []
    for reader in (read_segment, read_plainly):

        def read(query, reader=reader):
            return reader(lookup, blocks_per_turn, query, key, value, memory, POSITIONS)

        result, pull_back, after = jax.vjp(read, query, has_aux=True)
        outcomes.append((result, pull_back(cotangent), after))
    for one, other in zip(*map(jax.tree.leaves, outcomes), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("operations", [DEFAULT, KERNELS])
def test_what_an_earlier_document_left_is_not_read(operations):
    """Even if it is not a number."""
    query, key, value, cotangent = (jnp.asarray(normal(B, 2, H, 4, K, seed=seed)) for seed in range(4))
    clean = Memory(*(jnp.asarray(normal(B, H, 16, K, seed=seed)) for seed in (4, 5)))
    positions, outcomes = jnp.array([[4, 8], [4, 0]]), []
    for memory in (clean, Memory(*(x.at[:, :, 4:].set(jnp.nan) for x in clean))):

        def read(query, memory=memory):
            return read_segment(Lookup(J, "bucketed", True, operations), 1, query, key, value, memory, positions)[0]

        result, pull_back = jax.vjp(read, query)
        outcomes.append((result, pull_back(cotangent)))
    jax.tree.map(np.testing.assert_array_equal, *outcomes)


def model_and_carry(config, b=2):
    model = Model(config, V)
    params = model.init(jax.random.key(0))
    return model, params, begin(model, params, b)


def poison(carry, lane):
    """Replaces the memories of a lane by values that change every result."""
    layer = carry.layers[0]
    stored = Memory(*(x.at[lane].set(1e3) for x in layer["external_memory"].memory))
    return carry._replace(layers=[with_memory(layer, stored), *carry.layers[1:]])


def with_memory(layer, stored):
    return {"external_memory": layer["external_memory"]._replace(memory=stored)}


@pytest.mark.parametrize("update", ["block", "segment"])
def test_memories_leak_neither_into_another_lane_nor_into_the_next_document(update):
    model, params, carry = model_and_carry(memorizing(update=update))
    _, carry = read(model, params, tokens_of(2, 4), carry, starts(2, 4))
    # Lane 0 continues for two blocks before its next document begins.
    start = starts(2, 4, (0, 2))
    tokens = tokens_of(2, 4, seed=1)
    clean, clean_carry = read(model, params, tokens, carry, start)
    poisoned, poisoned_carry = read(model, params, tokens, poison(carry, 0), start)
    assert (np.abs(poisoned - clean)[0, : 2 * W] > 0).any()
    np.testing.assert_array_equal(poisoned[0, 2 * W :], clean[0, 2 * W :])
    np.testing.assert_array_equal(poisoned[1], clean[1])
    # Nor is anything of it found in the segments that follow.
    more = [read(model, params, tokens, c, starts(2, 4))[0] for c in (clean_carry, poisoned_carry)]
    np.testing.assert_array_equal(*more)


def test_a_segment_of_one_block_is_updated_alike():
    """The paper's memorizing baseline has segments of one window."""
    tokens, results = tokens_of(2, 4), []
    for update in ("block", "segment"):
        model, params, carry = model_and_carry(memorizing(update=update))
        for segment in np.split(tokens, 4, axis=1):
            logits, carry = read(model, params, segment, carry, starts(2, 1))
        results.append((logits, carry))
    jax.tree.map(np.testing.assert_array_equal, *results)


def test_updated_by_segments_a_segment_does_not_find_itself():
    """With the reference's rule the first segment has no memories, by blocks its later blocks have."""
    logits = {}
    for update in ("block", "segment"):
        config = memorizing(update=update)
        model, params, carry = model_and_carry(config)
        logits[update], _ = read(model, params, tokens_of(2, 4), carry, starts(2, 4))
    np.testing.assert_array_equal(logits["block"][:, :W], logits["segment"][:, :W])
    assert (np.abs(logits["block"] - logits["segment"])[:, W:] > 0).any(axis=-1).all()


@pytest.mark.parametrize("begins", [(), [(1, 3)], [(0, 2), (1, 4)]])
@pytest.mark.parametrize(("num_slots", "update"), [(4 * W, "block"), (12 * W, "block"), (12 * W, "segment")])
def test_a_step_that_is_not_taken_leaves_the_memory_as_it_was(num_slots, update, begins):
    """Also if a segment is longer than what is left of the ring, or documents begin inside the segment."""
    model, params, carry = model_and_carry(memorizing(num_slots=num_slots, update=update))
    for seed in range(3):
        before = carry
        _, carry = read(model, params, tokens_of(2, 5, seed=seed), before, starts(2, 5, *begins))
    assert (before.layers[0]["external_memory"].memory.key != carry.layers[0]["external_memory"].memory.key).any()
    same, backup = jax.jit(with_backup, static_argnums=1)(before, 5 * W)
    jax.tree.map(np.testing.assert_array_equal, same, before)
    for taken, expected in ((False, before), (True, carry)):
        jax.tree.map(np.testing.assert_array_equal, jax.jit(choose_carry)(jnp.array(taken), carry, backup), expected)


def test_a_segment_longer_than_the_memory_leaves_its_newest_tokens():
    stored = {}
    for update in ("block", "segment"):
        model, params, carry = model_and_carry(memorizing(num_slots=2 * W, update=update))
        _, carry = read(model, params, tokens_of(2, 6), carry, starts(2, 6, (1, 5)))
        stored[update] = np.asarray(carry.layers[0]["external_memory"].memory.key)
    # Keys of the first layer don't depend on memories. The second lane's document has one block.
    np.testing.assert_allclose(stored["segment"][0], stored["block"][0], atol=1e-6)
    np.testing.assert_allclose(stored["segment"][1, :, :W], stored["block"][1, :, :W], atol=1e-6)
    np.testing.assert_array_equal(stored["segment"][1, :, W:], 0)


def test_gradients_reach_the_gate_and_the_query_but_no_memory():
    model, params, carry = model_and_carry(CONFIG)
    _, carry = read(model, params, tokens_of(2, 4), carry, starts(2, 4))

    def total(params, stored):
        layer = with_memory(carry.layers[0], stored)
        module = model.bind(params)
        hidden, _ = module(tokens_of(2, 1, seed=1), carry._replace(layers=[layer, carry.layers[1]]), starts(2, 1))
        return jnp.sum(hidden**3)

    memory = carry.layers[0]["external_memory"].memory
    of_params, of_memory = jax.jit(jax.grad(total, argnums=(0, 1)))(params, memory)
    assert (np.abs(of_params["layers"][0]["mixers"]["external_memory"]["gate"]) > 0).all()
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(of_memory))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_slots": 10}, "num_slots=10 must be a multiple of window_length=4"),
        ({"num_neighbors": 20}, "num_slots=16 must be at least num_neighbors=20 for search='exact'"),
        ({"search": "bucketed"}, "num_slots=16 must be a multiple of num_neighbors=3"),
        ({"search": "best"}, "search='best' is not one of exact, bucketed"),
    ],
)
def test_mistakes(changes, message):
    with pytest.raises(UserError, match=message):
        memorizing(**changes)


def test_a_layer_has_one_attention_to_the_window():
    with pytest.raises(UserError, match="external_memory and recurrent_states each have the attention to the window"):
        dataclasses.replace(CONFIG, pattern=("recurrent_states+external_memory+feedforward",))
