"""The adaptive embedding and softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from meliad_like.families.shortformer import AdaptiveVocabulary, ShortformerConfig

V, D = 40, 16


def make(cutoffs=(8, 20), dropout_rate=0.0):
    config = ShortformerConfig(model_width=D, cutoffs=cutoffs, band_factor=2, softmax_dropout_rate=dropout_rate)
    vocabulary = AdaptiveVocabulary(config, V, rngs=nnx.Rngs(0))
    hidden = jax.random.normal(jax.random.key(1), (3, 16, D))
    targets = jax.random.randint(jax.random.key(2), (3, 16), 0, V)
    return vocabulary, hidden, targets


@pytest.mark.parametrize(("cutoffs", "slice_length"), [((8, 20), 16), ((1, 39), 3), ((), 16)])
def test_the_loss_is_that_of_all_log_probabilities(cutoffs, slice_length):
    vocabulary, hidden, targets = make(cutoffs)
    everything = vocabulary.log_probabilities(hidden)
    np.testing.assert_allclose(jnp.exp(everything).sum(axis=-1), 1, rtol=1e-5)
    losses = vocabulary.score(hidden, targets, slice_length)
    np.testing.assert_allclose(losses.nats, -np.take_along_axis(everything, targets[..., None], -1)[..., 0], rtol=1e-5)
    np.testing.assert_array_equal(losses.correct, everything.argmax(axis=-1) == targets)


def test_scores_of_words_and_clusters_are_float32_whatever_the_hidden_vectors_are():
    vocabulary, hidden, _ = make()
    hidden = (4 * hidden).astype(jnp.bfloat16)

    def rounded(x):
        return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)

    tables = rounded(vocabulary.bands[0].embedding[...]).T, rounded(vocabulary.clusters.kernel[...])
    head = rounded(hidden) @ np.concatenate(tables, axis=1)
    expected = head - np.log(np.exp(head).sum(axis=-1, keepdims=True))
    everything = np.asarray(vocabulary.log_probabilities(hidden), np.float64)
    clusters = [np.log(np.exp(everything[..., a:b]).sum(axis=-1, keepdims=True)) for a, b in ((8, 20), (20, V))]
    np.testing.assert_allclose(np.concatenate([everything[..., :8], *clusters], axis=-1), expected, atol=1e-4)


def test_the_most_likely_token_is_found_in_every_band():
    vocabulary, hidden, _ = make()
    # Hidden vectors of several lengths: the longest are sure of a word.
    hidden = hidden * jnp.array([0.1, 5, 30])[:, None, None]
    best = vocabulary.log_probabilities(hidden).argmax(axis=-1)
    assert (np.histogram(best, [0, 8, 20, V])[0] > 0).all()
    assert vocabulary.score(hidden, best, 16).correct.all()
    assert not vocabulary.score(hidden, (best + 1) % V, 16).correct.any()


def test_gradients_are_those_of_all_log_probabilities():
    vocabulary, hidden, targets = make()
    graphdef, params = nnx.split(vocabulary)

    def through_pieces(params, hidden):
        return nnx.merge(graphdef, params).score(hidden, targets, 4).nats.sum()

    def through_everything(params, hidden):
        everything = nnx.merge(graphdef, params).log_probabilities(hidden)
        return -jnp.take_along_axis(everything, targets[..., None], -1).sum()

    ours, theirs = (jax.jit(jax.grad(f, argnums=(0, 1)))(params, hidden) for f in (through_pieces, through_everything))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), ours, theirs)


def test_every_id_gets_its_tail_term():
    """Fairseq's training loss leaves it out for the second id of each narrower band (its padding id there)."""
    vocabulary, hidden, _ = make()
    everything = vocabulary.log_probabilities(hidden[:1])
    for token in (8, 9, 20, 21):
        nats = vocabulary.score(hidden[:1], np.full((1, 16), token), 16).nats
        np.testing.assert_allclose(nats, -everything[..., token], rtol=1e-5)


def test_logits_of_the_whole_vocabulary_never_exist():
    """Of 64 tokens, at most 8 meet the rare words at once, where 4 x 16 x 1000 logits would be all."""
    config = ShortformerConfig(model_width=D, cutoffs=(10,), band_factor=2, softmax_dropout_rate=0.0)
    vocabulary = AdaptiveVocabulary(config, 1000, rngs=nnx.Rngs(0))
    hidden, targets = jnp.ones((4, 16, D)), jnp.ones((4, 16), jnp.int32)
    text = str(jax.make_jaxpr(jax.grad(lambda h: vocabulary.score(h, targets, 16).nats.sum()))(hidden))
    assert "f32[8,990]" in text
    assert "f32[64,990]" not in text and "f32[4,16,990]" not in text


def test_embeddings_of_a_band_are_narrow_vectors_projected():
    vocabulary, _, _ = make()
    bands = vocabulary.bands
    assert [band.embedding.shape for band in bands] == [(8, 16), (12, 8), (20, 4)]
    tokens = np.array([[7, 8], [19, 39]])
    expected = [
        bands[i].embedding[...][row] @ bands[i].projection[...] for i, row in ((0, 7), (1, 0), (1, 11), (2, 19))
    ]
    np.testing.assert_allclose(vocabulary.embed(tokens, jnp.float32).reshape(4, D), expected, atol=1e-6)


def test_dropout_of_the_softmax():
    vocabulary, hidden, targets = make(dropout_rate=0.5)
    kept = vocabulary.score(hidden, targets, 16).nats
    first, same, other = (vocabulary.score(hidden, targets, 16, jax.random.key(i)).nats for i in (0, 0, 1))
    np.testing.assert_array_equal(first, same)
    assert np.abs(first - other).max() > 0.1 and np.abs(first - kept).max() > 0.1
