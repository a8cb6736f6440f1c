"""Different ways to compute the same result with models of any family: whole segments, and token by token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from meliad_like.studies.interventions import exchange, part_names

W, V = 4, 50


@functools.partial(jax.jit, static_argnums=0)
def read(model, params, tokens, carry, start):
    """Reads a segment at once; returns logits [b, n, v] and the carry after it."""
    module = model.bind(params)
    hidden, carry = module(tokens, carry, start)
    return module.logits(hidden), carry


@functools.partial(jax.jit, static_argnums=0)
def decode_token(model, params, token, carry):
    return model.bind(params).decode_step(token, carry)


def decode(model, params, tokens, carry):
    """Reads token by token; returns logits [b, n, v] and the carry after them."""
    logits = []
    for token in tokens.T:
        one, carry = decode_token(model, params, token, carry)
        logits.append(one)
    return np.stack(logits, axis=1), carry


def begin(model, params, b, decoding=False):
    module = model.bind(params)
    carry = module.init_carry(b)
    return module.begin_decoding(carry) if decoding else carry


# The checks below read 4 blocks or one of two lanes, so that they share their programs.
def tokens_of(b, blocks, seed=0):
    return np.random.default_rng(seed).integers(0, V, (b, blocks * W), np.int32)


def starts(b, blocks, *at):
    """bool[b, blocks]: true at the places (lane, block)."""
    flags = np.zeros((b, blocks), bool)
    for lane, block in at:
        flags[lane, block] = True
    return flags


def assert_same(ours, theirs):
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5, rtol=1e-5), ours, theirs)


# The numbers of tokens that two lanes decode at once: none, parts of blocks, whole blocks, and one. In all these are 4
# blocks of each.
PIECES = np.array([(3, 1), (1, 3), (0, W), (W, 0), (W, W), (2, 2), (1, 1), (1, 1)])


@functools.partial(jax.jit, static_argnums=0)
def decode_tokens(model, params, tokens, counts, carry):
    module = model.bind(params)
    outputs, carry = module.read_tokens(tokens, counts, carry)
    return module.logits(module.finish(outputs[-1], None)), carry


def decode_pieces(model, params, tokens, carry):
    """Reads 4 blocks of two lanes in `PIECES`; returns as `decode`. The padding has vectors of NaN, as unknown ids."""
    logits, place, unknown = [[], []], np.zeros(2, int), np.iinfo(np.int32).max
    for counts in PIECES:
        piece = np.full((2, W), unknown, np.int32)
        for lane, (at, count) in enumerate(zip(place, counts)):
            piece[lane, :count] = tokens[lane, at : at + count]
        if (counts == 1).all():
            some, carry = decode(model, params, piece[:, :1], carry)
        else:
            some, carry = decode_tokens(model, params, piece, counts, carry)
        for lane, count in enumerate(counts):
            logits[lane].append(some[lane, :count])
        place += counts
    assert place.tolist() == [tokens.shape[1]] * 2
    return np.stack([np.concatenate(x) for x in logits]), carry


def check_token_by_token(model, params):
    """Decoding one token or several at a time equals the segments, also after changes from one to the other."""
    segments = np.split(tokens_of(2, 16), 4, axis=1)
    expected, carry = [], begin(model, params, 2)
    for segment in segments:
        logits, carry = read(model, params, segment, carry, starts(2, 4))
        expected.append(logits)
    carry, module = begin(model, params, 2, decoding=True), model.bind(params)
    first, carry = decode_pieces(model, params, segments[0], carry)
    second, carry = read(model, params, segments[1], module.end_decoding(carry), starts(2, 4))
    third, carry = decode(model, params, segments[2], module.begin_decoding(carry))
    fourth, _ = decode_pieces(model, params, segments[3], carry)
    assert_same([first, second, third, fourth], expected)


def check_lanes(model, params):
    """Lanes decode independently: lane 1 is 3 tokens behind, so that the lanes' blocks end at different steps."""
    tokens = tokens_of(2, 8)
    _, three = decode(model, params, tokens[:, :3], begin(model, params, 2, decoding=True))
    _, six = decode(model, params, tokens[:, 3:6], three)
    carry = jax.tree.map(lambda x, y: np.concatenate([x[:1], y[1:]]), six, three)
    assert carry.position.tolist() == [6, 3]
    logits, _ = decode(model, params, np.stack([tokens[0, 6:22], tokens[1, 3:19]]), carry)
    first, carry = read(model, params, tokens[:, : 4 * W], begin(model, params, 2), starts(2, 4))
    second, _ = read(model, params, tokens[:, 4 * W :], carry, starts(2, 4))
    expected = jnp.concatenate([first, second], axis=1)
    assert_same(logits, jnp.stack([expected[0, 6:22], expected[1, 3:19]]))


def check_segments(model, params):
    """A document gives the same results and the same carry in segments of four blocks and of one."""
    results = []
    for blocks in (4, 1):
        carry, pieces = begin(model, params, 2), []
        for segment in np.split(tokens_of(2, 8), 8 // blocks, axis=1):
            logits, carry = read(model, params, segment, carry, starts(2, blocks))
            pieces.append(logits)
        results.append((np.concatenate(pieces, axis=1), carry))
    assert_same(*results)


def check_documents(model, params):
    """Documents that begin inside of a segment equal the same documents alone, and leave the same carry."""
    tokens, n, carry = tokens_of(2, 4), 4 * W, begin(model, params, 2)
    # Both lanes continue another document; lane 0 has two beginnings, lane 1 begins at once.
    for seed in (1, 2):
        _, carry = read(model, params, tokens_of(2, 4, seed), carry, starts(2, 4))
    together, carry = read(model, params, tokens, carry, starts(2, 4, (0, 1), (0, 3), (1, 0)))
    assert carry.position.tolist() == [W, 4 * W]
    for lane, first, last in ((0, W, 3 * W), (0, 3 * W, n), (1, 0, n)):
        alone = np.zeros((2, n), np.int32)
        alone[0, : last - first] = tokens[lane, first:last]
        expected, alone_carry = read(model, params, alone, begin(model, params, 2), starts(2, 4))
        assert_same(together[lane, first:last], expected[0, : last - first])
    return carry, alone_carry


def check_parts(model, params):
    """A carry with all parts of another one is that one, at whatever places of their documents both are."""
    config, next_tokens, next_starts = model.config, tokens_of(2, 4, seed=3), starts(2, 4, (1, 2))
    _, here = read(model, params, tokens_of(2, 4), begin(model, params, 2), starts(2, 4))
    _, there = read(model, params, tokens_of(2, 4, seed=1), begin(model, params, 2), starts(2, 4))
    _, there = read(model, params, tokens_of(2, 1, seed=2), there, starts(2, 1))
    for other in (here, there, begin(model, params, 2)):
        exchanged = exchange(config, here, other, part_names(config, here))
        expected, after = read(model, params, next_tokens, other, next_starts)
        logits, exchanged = read(model, params, next_tokens, exchanged, next_starts)
        assert_same(logits, expected)
        assert_same(exchanged, after)
