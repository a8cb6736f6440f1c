"""Beam search finds what an enumeration of all continuations finds, and hypotheses keep their own memory."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from decoders import with_mixer
from families import CONFIGS, LLAMA, RECURRENCE, C, W

from meliad_like.config import RunConfig
from meliad_like.data.readers import LanesReaderConfig
from meliad_like.errors import UserError
from meliad_like.library import LanguageModel
from meliad_like.mixers.gated_delta_rule import GatedDeltaRule
from meliad_like.models.model import Model
from meliad_like.run.opening import OpenedCheckpoint
from meliad_like.vocabularies.base import Vocabulary

END, LENGTH, WIDTH = 5, 4, 125
"""No hypothesis is lost, if the width is that of all that go on before the last step: 5 ** 3."""
FAMILIES = {
    **{name: CONFIGS[name] for name in ("slide", "lstm:dual", "rotary", "feedback", "memorizing", "gpt2")},
    "gated delta rule": with_mixer(CONFIGS["slide"], GatedDeltaRule(), (0,)),
    "shortformer": dataclasses.replace(CONFIGS["shortformer"], cutoffs=(2, 4)),
    "overlapping llama": dataclasses.replace(LLAMA, overlap=1, max_positions=W, **RECURRENCE),
}


class Letters(Vocabulary):
    """The letters a to e, and the end of a document."""

    kind = "letters"

    def __init__(self):
        super().__init__([bytes([letter]) for letter in b"abcde"], END, 1)

    def encode(self, text):
        return np.array([b"abcde".index(letter) for letter in text.encode()], np.int32)


def language_model(name, seed=1) -> LanguageModel:
    """A model whose next tokens depend on all that it remembers."""
    model, generator = Model(FAMILIES[name], 6), np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: np.asarray(x) + generator.normal(0, 0.5, x.shape).astype(np.float32), model.init(jax.random.key(seed))
    )
    run = RunConfig(model=model.config, data=LanesReaderConfig(segment_length=C * W, tokens_per_step=C * W))
    return LanguageModel(OpenedCheckpoint(run, model, params, Letters(), 0))


@pytest.fixture(scope="module")
def lm(request):
    return language_model(request.param)


def of_some(*names):
    """Every family in the exhaustive tests, and these families always."""
    marked = [pytest.param(name, marks=() if name in names else pytest.mark.exhaustive) for name in FAMILIES]
    return pytest.mark.parametrize("lm", marked, indirect=True, scope="module")


@pytest.fixture(scope="module")
def recurrent():
    return language_model("lstm:dual")


def all_texts(ends=(END,), forbidden=()):
    """All texts that end with one of `ends`, or have the largest length."""
    allowed = [token for token in range(6) if token not in forbidden]
    for length in range(1, LENGTH + 1):
        for text in itertools.product(allowed, repeat=length):
            if not set(text[:-1]) & set(ends) and (text[-1] in ends or length == LENGTH):
                yield text


def enumerated(lm, start, alpha=0.0, **restrictions):
    """All continuations with their scores, the best first."""
    texts = list(all_texts(**restrictions))
    scores = [score.log_probability for score in lm.score_batch(texts, start)]
    normalised = [score / ((5 + len(text)) / 6) ** alpha for score, text in zip(scores, texts)]
    return sorted(zip(normalised, texts), reverse=True)


@of_some("lstm:dual", "shortformer")
@pytest.mark.parametrize("alpha", [pytest.param(0.0, marks=pytest.mark.exhaustive), 1.5])
def test_a_wide_beam_finds_what_an_enumeration_finds(lm, alpha):
    # The first block ends while the hypotheses grow, and so what they remember of it has to follow them.
    start = lm.read("abc")
    found = lm.search(start, LENGTH, width=WIDTH, length_penalty=alpha)[:40]
    expected = enumerated(lm, start, alpha)[:40]
    np.testing.assert_allclose([one.score for one in found], [score for score, _ in expected], atol=1e-5)
    assert [tuple(one.tokens) for one in found] == [text for _, text in expected]
    assert {one.ended for one in found} == {True, False}


@of_some("lstm:dual")
def test_hypotheses_have_their_own_memory(lm):
    start = lm.read("abcde" * 3)
    # A narrow beam drops hypotheses and extends others twice in nearly every step.
    found = lm.search(start, 3 * W, width=3, end_tokens=())
    scores = lm.score_batch([one.tokens for one in found], start)
    for one, score in zip(found, scores, strict=True):
        assert one.log_probability == pytest.approx(score.log_probability, abs=1e-4)
        assert one.state.num_tokens == score.state.num_tokens == start.num_tokens + 3 * W
    states = [one.state for one in [*found, *scores]]
    next_tokens = [outputs.logits for outputs in lm.forward_batch(["edcba"] * 6, states)]
    np.testing.assert_allclose(next_tokens[:3], next_tokens[3:], atol=1e-3)


def test_width_1_is_greedy():
    # A seed with which some of the texts end.
    lm, starts = language_model("lstm:dual", seed=2), ["a", "abcdeabc", "cc", "eda"]
    written = lm.generate_batch(starts, 3 * W, temperature=0)
    for [best], greedy in zip(lm.search_batch(starts, 3 * W, width=1), written, strict=True):
        assert (best.tokens, best.text, best.ended) == (greedy.tokens, greedy.text, greedy.ended)
    assert {one.ended for one in written} == {True, False}


def test_ends_and_masks(recurrent):
    start, restrictions = recurrent.read("ab"), {"ends": (1, 3), "forbidden": (0, END)}
    found = recurrent.search(start, LENGTH, width=WIDTH, end_tokens={1, 3}, forbidden_tokens=[0, END])[:30]
    expected = enumerated(recurrent, start, **restrictions)[:30]
    assert [tuple(one.tokens) for one in found] == [text for _, text in expected]
    assert all(one.ended == (one.tokens[-1] in (1, 3)) for one in found)
    assert found[0].text == "".join("abcde"[token] for token in found[0].tokens)


def test_ended_hypotheses_are_continued_after_their_end_token(recurrent):
    [best] = recurrent.search("ab", 20, width=1, end_tokens=[0])
    assert best.ended and best.tokens[-1] == 0
    whole = recurrent.read([0, 1, *best.tokens])
    assert (
        recurrent.generate(best.state, 10, temperature=0).tokens == recurrent.generate(whole, 10, temperature=0).tokens
    )


@pytest.mark.thorough
def test_the_memory_of_a_hypothesis_that_has_ended_stays(recurrent):
    """In the steps in which others are extended it is a candidate, and reads nothing more."""
    start = recurrent.read("abc")
    found = recurrent.search(start, 2 * W, width=12, end_tokens=[0, 1])
    ended = [one for one in found if one.ended]
    assert min(len(one.tokens) for one in ended) + 1 < max(len(one.tokens) for one in found)
    states = [*(one.state for one in ended), *recurrent.read_batch([one.tokens for one in ended], start)]
    outputs = [outputs.logits for outputs in recurrent.forward_batch(["edcba"] * len(states), states)]
    np.testing.assert_allclose(outputs[: len(ended)], outputs[len(ended) :], atol=1e-3)


@pytest.mark.thorough
def test_texts_are_searched_alone(recurrent):
    starts = ["a", recurrent.read("abcdeabcde"), "ccc"]
    for start, found in zip(starts, recurrent.search_batch(starts, 6, width=4, length_penalty=0.6), strict=True):
        alone = recurrent.search(start, 6, width=4, length_penalty=0.6)
        assert [one.tokens for one in found] == [one.tokens for one in alone]
        np.testing.assert_allclose([one.score for one in found], [one.score for one in alone], atol=1e-5)


def test_there_may_be_fewer_hypotheses_than_asked_for(recurrent):
    found = recurrent.search("ab", 1, width=8)
    assert sorted(one.tokens for one in found) == [[token] for token in range(6)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"forbidden_tokens": range(6)}, "forbidden_tokens has all 6 tokens of the vocabulary: allow one"),
        ({"forbidden_tokens": [6]}, "forbidden_tokens: token 6 is not in the vocabulary of 6"),
        ({"end_tokens": [-1]}, "end_tokens: token -1 is not in the vocabulary of 6"),
        ({"width": 0}, "width=0 must be at least 1"),
        ({"length_penalty": -0.5}, "length_penalty=-0.5 must be at least 0"),
        ({"tokens": 0}, "tokens=0 must be at least 1"),
        ({"start": ""}, "there is nothing to continue: the prompt is empty"),
    ],
)
def test_mistakes_are_named(recurrent, settings, message):
    with pytest.raises(UserError) as error:
        recurrent.search(**{"start": "ab"} | settings)
    assert str(error.value) == message
