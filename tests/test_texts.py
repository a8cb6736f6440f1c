"""Texts that go in and out of a model: their bytes, what continues them, and the ids that are never written."""

import io
import math

import numpy as np
import pytest
import sentencepiece
from families import BYTES, CONFIGS, language_model
from tokenizers import AddedToken, Tokenizer, decoders, models

from meliad_like.errors import UserError
from meliad_like.run.text import encode_text
from meliad_like.vocabularies.base import ByteVocabulary
from meliad_like.vocabularies.dictionary import DictionaryVocabulary
from meliad_like.vocabularies.sentencepiece import SentencePieceVocabulary
from meliad_like.vocabularies.tokenizers import TokenizersVocabulary

TEXT = "hello world the cat sat on the mat"
EURO = "ab\u20ac".encode()


def like_llama_2(**options) -> SentencePieceVocabulary:
    """SentencePiece that puts a space before a text."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(  # type: ignore[attr-defined]
        sentence_iterator=iter([TEXT] * 50), model_writer=model, vocab_size=300, model_type="bpe", byte_fallback=True,
        minloglevel=2, hard_vocab_limit=False, **options,
    )  # fmt: skip
    return SentencePieceVocabulary(model.getvalue())


EXACT = {"remove_extra_whitespaces": False, "normalization_rule_name": "identity"}


@pytest.fixture(scope="module")
def lm():
    return language_model(CONFIGS["slide"])


@pytest.mark.parametrize(
    ("vocabulary", "text"),
    [
        (like_llama_2(**EXACT), "hello world"),
        (like_llama_2(), "hello  world"),
        (DictionaryVocabulary([("the", 3), ("cat", 2)]), "the cat\nthe dog"),
        (BYTES, "5\u20ac"),
    ],
)
def test_bytes_are_those_of_the_text(vocabulary, text):
    assert encode_text(vocabulary, text).num_bytes == len(text.encode())


def test_the_bytes_of_tokens_are_those_of_their_text():
    vocabulary = like_llama_2(**EXACT)
    assert encode_text(vocabulary, vocabulary.encode("hello world")).num_bytes == 11
    assert encode_text(vocabulary, vocabulary.encode("hello world"), continues=True).num_bytes == 12


@pytest.mark.parametrize("text", ["ld", " the mat", "\u20ac"])
@pytest.mark.parametrize("options", [EXACT, {}])
def test_a_text_continues_inside_of_a_word(text, options):
    vocabulary = like_llama_2(**options)
    encoded = encode_text(vocabulary, text, continues=True)
    assert vocabulary.decode_bytes(encoded.tokens.tolist()) == text.encode()
    assert encoded.num_bytes == len(text.encode())


def test_states_know_the_bytes_of_unfinished_characters(lm):
    for start in (2, 3):
        state = lm.read(list(EURO[:start]))
        for after in (lm.read(list(EURO[start:4]), state), lm.score(list(EURO[start:4]), state).state):
            assert after.unfinished == EURO[2:4]
            assert lm.read("", after).unfinished == EURO[2:4]
            assert lm.read(list(EURO[4:]), after).unfinished == b""
    forbidden = [token for token in range(BYTES.size) if token != EURO[4]]
    assert lm.search(list(EURO[:4]), 1, width=1, forbidden_tokens=forbidden)[0].text == "\u20ac"


def test_scores_without_bytes_and_impossible_lengths(lm):
    assert math.isnan(lm.score("").bits_per_byte)
    with pytest.raises(UserError, match="tokens=-1 must be at least 0"):
        lm.generate("a", -1)


@pytest.mark.thorough
def test_ids_that_stand_for_nothing_are_never_written():
    vocabulary = ByteVocabulary(size_multiple=1024)
    lm = language_model(CONFIGS["slide"], vocabulary)
    for settings in ({}, {"stop_at_end": False, "top_k": 1000}, {"temperature": 0.0}):
        written = lm.generate_batch(["ab"] * 20, 20, seeds=range(20), **settings)
        assert max(token for text in written for token in text.tokens) <= vocabulary.end_of_document
    hypotheses = lm.search("ab", 3, width=8)
    assert max(token for text in hypotheses for token in text.tokens) <= vocabulary.end_of_document
    # The probabilities of given texts are over all ids.
    score = lm.score([97, 98, *hypotheses[0].tokens]).log_probabilities[2:].sum()
    assert hypotheses[0].log_probability == pytest.approx(score, abs=1e-5)
    assert np.exp(lm.score([97, 1000]).log_probability) > 0


def test_which_ids_stand_for_something():
    def unwritable(vocabulary):
        return np.flatnonzero(~vocabulary.writable).tolist()

    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<pad>", "<end>")])
    assert unwritable(TokenizersVocabulary(tokenizer.to_str(), "<end>", 8)) == [2, 4, 5, 6, 7]
    # <s>, <pad>, and a word that fills the dictionary up.
    assert unwritable(DictionaryVocabulary([("a", 1), ("madeupword0000", 0)], 8)) == [0, 1, 5, 6, 7]
    # <s>, and U+2581 alone is the space that begins a text.
    assert unwritable(like_llama_2()) == [1]
