"""Documents in words and tokens: their beginnings, the distance to their last occurrence, and their word classes."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from meliad_like.families.pretrained.config import PretrainedConfig
from meliad_like.studies.compare import compare
from meliad_like.studies.readings import ModelLosses
from meliad_like.studies.units import Units, categories, is_title, make_units
from meliad_like.vocabularies.base import ByteVocabulary
from meliad_like.vocabularies.sentencepiece import SentencePieceVocabularyConfig

VOCABULARY = ByteVocabulary()


def units_of(text, unit, vocabulary=VOCABULARY):
    tokens = np.append(vocabulary.encode(text), vocabulary.end_of_document)
    return make_units(tokens, vocabulary, unit)


def texts(units):
    return [units.text[start:end].decode() for start, end in zip(units.starts, units.ends, strict=True)]


def test_words_of_bytes():
    units = units_of("é_1 = run2(x)\n\n  “Ja!”", "word")
    assert texts(units) == ["é_1", " ", "=", " ", "run2", "(", "x", ")", "\n\n  ", "“", "Ja", "!", "”", ""]
    assert units.first.tolist() == [0, 4, 5, 6, 7, 11, 12, 13, 14, 18, 21, 23, 24, 27]


def test_bytes_of_one_character_are_together():
    assert texts(units_of("aé中", "token")) == ["a", "é", "中", ""]


def test_bytes_that_are_no_text():
    tokens = np.array([0xFF, ord("a"), 0x80, ord(" "), 256])
    units = make_units(tokens, VOCABULARY, "word")
    assert units.text == b"\xffa\x80 " and units.ends[-1] == 4


def test_tokens_of_sentencepiece_belong_to_the_word_that_they_end_in():
    text = "the sea, the sea, the open sea and the other seas\n" * 20
    vocabulary = SentencePieceVocabularyConfig(size=275).make([text])
    units = units_of(text, "word", vocabulary)
    assert b"".join(part.encode() for part in texts(units)) == text.encode()
    # Whether the space before it is a part of the word's token or not, the word is the same.
    assert units.keys.count(b"sea") == 60 and units.keys.count(b"seas") == 20
    assert max(np.diff(units.first)) > 1
    tokens = units_of(text, "token", vocabulary)
    assert len(tokens.keys) == len(vocabulary.encode(text)) + 1


def test_how_far_back_the_same_last_began():
    keys = [b"a", b"b", b"a", b"c", b"b", b"a", b"d"]
    first = np.array([0, 2, 3, 5, 9, 10, 12])
    units = Units(b"abacbad", first, np.arange(1, 8), np.arange(7), keys)
    assert units.distances().tolist() == [0, 0, 3, 0, 7, 7, 0]


def test_places():
    #                 0123456789
    units = units_of("abacbdbeea", "token")
    assert units.distances().tolist() == [0, 0, 2, 0, 3, 0, 2, 0, 1, 7, 0]
    # A sliding window of 2, segments of 5: what predicts token 4 is token 3, which sees 1 and 2; token 9 is predicted
    # in the segment that begins with token 5, and the last a is token 2.
    found = units.places(3, 5).tolist()
    w, n, e = "window", "never", "earlier"
    assert found == [n, n, w, n, w, n, w, n, w, e, n]
    assert units.places(2, 5)[4] == "segment"
    assert units.places(2, 3)[4] == "earlier"
    assert units.places(7, 5)[9] == "window"


def test_windows_that_do_not_slide_show_what_is_in_them():
    tokens = np.append(VOCABULARY.encode("abacbdbeea"), VOCABULARY.end_of_document)
    run = SimpleNamespace(model=PretrainedConfig(window_length=3))
    studied: Any = SimpleNamespace(run=run, opened=SimpleNamespace(vocabulary=VOCABULARY))
    counted = np.arange(10) != 2
    losses = ModelLosses(studied, [np.zeros(10)], [counted])
    chosen: Any = SimpleNamespace(documents=SimpleNamespace(names=["one"]), whole=lambda index: tokens)
    [(_, table)] = compare(losses, losses, chosen, "token", segment=5)
    # The b at 4 is predicted by the first token of the second window, which the b at 1 is not in.
    w, s, n, e = "window", "segment", "never", "earlier"
    assert table["place"].tolist() == [n, n, w, n, s, n, w, n, w, e, n]
    # The first token is not a target, and the target after token 2 costs no loss.
    assert table["targets"].tolist() == [0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1]


TEXT = """CHAPTER I. Loomings

Call me Ishmael, said my_friend2 to the call of XIV men. The parseArgs of utf8 call it
Queequeg.

MOBY DICK

# Notes

#not a title, me neither
A line in the middle SAYS NO.
"""


def test_categories():
    units = units_of(TEXT, "word")
    found = {key.decode(): kind for key, kind in zip(units.keys, categories(units), strict=True)}
    expected = {
        "title": ["CHAPTER", "I", "Loomings", "MOBY", "DICK", "Notes"],
        "name": ["Ishmael", "Queequeg", "SAYS", "NO"],
        "identifier": ["my_friend2", "parseArgs", "utf8"],
        "word": ["Call", "call", "XIV", "The", "men", "A", "middle"],
        "sign": [",", " ", "#", "\n", ""],
    }
    assert {name: [word for word in words if found[word] != name] for name, words in expected.items()} == {
        name: [] for name in expected
    }


@pytest.mark.parametrize(
    ("line", "alone", "title"),
    [
        ("Chapter the First", False, True),
        ("ACT II", False, True),
        ("Section 4.6 Results", False, True),
        ("Section 4.6 describes this", False, False),
        ("part of the whole", True, False),
        ("THE END", True, True),
        ("THE END", False, False),
        ("## Method", True, True),
        (r"\subsection{Method}", True, True),
        ("X" * 81, True, False),
    ],
)
def test_titles(line, alone, title):
    assert is_title(line, alone) == title
