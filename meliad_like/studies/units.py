"""A document's tokens grouped in words or characters: the distance to the last occurrence, and the kind of word."""

import re
from typing import NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Bool, Int

from meliad_like.vocabularies.base import Vocabulary

PLACES = ("window", "segment", "earlier", "never")
"""Places of the last equal unit, the nearest first (see `Units.places`)."""
CATEGORIES = ("title", "name", "identifier", "word", "sign")
"""The kinds of words (see `categories`)."""

WORD = re.compile(r"\w{1,200}|\s{1,200}|.", re.DOTALL)
NUMBERED_TITLE = re.compile(
    r"(?i:chapter|book|part|act|scene|section|canto|volume|letter|appendix)\s+(?i:the\s+)?"
    r"(?:\d+(?:\.\d+)*|[IVXLCDM]+|[A-Z]|(?i:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|first|second|"
    r"third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|last))\b[\s.:,;)—–-]*(?=$|[A-Z\"'“‘])"
)
MARKED_TITLE = re.compile(r"#{1,6} \S|\\(?:chapter|part|(?:sub)*section|paragraph)\*?\{|=+ .* =+$")
IDENTIFIER = re.compile(r"\w*(?:_|[a-z][A-Z]|[A-Za-z][0-9]|[0-9][A-Za-z])\w*")
ROMAN = re.compile(r"[IVXLCDM]+")
LONGEST_TITLE = 80


class Units(NamedTuple):
    """The tokens of a document in consecutive groups."""

    text: bytes
    """The whole text; control tokens such as the end of the document have no bytes."""
    first: Int[np.ndarray, " units"]
    """The first token of each unit."""
    ends: Int[np.ndarray, " units"]
    """The end of each unit in the text, in bytes."""
    word: Int[np.ndarray, " units"]
    """The first byte of the word that each unit belongs to."""
    keys: list[bytes]
    """Units with the same key count as equal: the letters of a word, or the bytes of a token."""

    @property
    def starts(self) -> Int[np.ndarray, " units"]:
        """The beginning of each unit in the text."""
        return np.append(0, self.ends[:-1])

    def distances(self) -> Int[np.ndarray, " units"]:
        """The number of tokens from the beginning of the last equal unit to this one's; 0 if there is none."""
        return pd.Series(self.first).groupby(pd.Series(self.keys)).diff().fillna(0).to_numpy(np.int64)

    def places(self, visible: Int[np.ndarray, " units"] | int, segment: int) -> np.ndarray:
        """The place of the last equal unit, by the names in PLACES.

        `window`: among the `visible` tokens before it, which are the token that predicts it and those that this token
        sees in one layer. `segment`: further back, but in the segment of the token that predicts it. Segments are
        counted from the beginning of the document.
        """
        distances = self.distances()
        same_segment = (self.first - distances) // segment == (self.first - 1) // segment
        conditions = [distances == 0, distances <= visible, same_segment]
        return np.select(conditions, ["never", "window", "segment"], "earlier")


def make_units(tokens: Int[np.ndarray, " tokens"], vocabulary: Vocabulary, unit: str) -> Units:
    """Groups a document's tokens.

    A `unit` is a `token`, where tokens that share a character are together; or a `word`, where a token belongs to the
    word that its last byte belongs to. Words are runs of letters, digits and _, or of white space, or single signs.
    """
    pieces = {int(token): vocabulary.decode_bytes([token]) for token in np.unique(tokens)}
    by_token = [pieces[token] for token in tokens.tolist()]
    text = b"".join(by_token)
    token_ends = np.cumsum([len(piece) for piece in by_token])
    token_starts = np.append(0, token_ends[:-1])
    empty = token_ends == token_starts
    word_starts = _word_starts(text)
    words = word_starts[np.searchsorted(word_starts, np.maximum(token_ends - 1, 0), side="right") - 1]
    if unit == "word":
        begins = np.append(True, words[1:] != words[:-1])
    else:
        first_bytes = np.frombuffer(text + b"\0", np.uint8)[token_starts]
        begins = (first_bytes & 0xC0) != 0x80
    begins |= empty | np.append(True, empty[:-1])
    first = np.flatnonzero(begins)
    last = np.append(first[1:], len(tokens)) - 1
    ends = token_ends[last]
    keys = [text[start:end] for start, end in zip(token_starts[first].tolist(), ends.tolist(), strict=True)]
    if unit == "word":
        # A SentencePiece token brings the space before its word along.
        keys = [key.strip() or key for key in keys]
    return Units(text, first, ends, words[last], keys)


def categories(units: Units) -> np.ndarray:
    """The kind of word that each unit belongs to, one of CATEGORIES, by the rules on the page of `compare`."""
    word_starts = np.append(_word_starts(units.text), len(units.text))
    word_ends = word_starts[np.searchsorted(word_starts, units.word, side="right")]
    spans = zip(units.word.tolist(), word_ends.tolist(), strict=True)
    texts = [units.text[start:end].decode("utf-8", "replace") for start, end in spans]
    present = set(texts)
    kinds = {text: _category(text, present) for text in present}
    names = np.array([kinds[text] for text in texts], object)
    names[units.ends == units.starts] = "sign"
    names[_in_titles(units) & (names != "sign")] = "title"
    return names


def _category(word: str, present: set[str]) -> str:
    if not any(map(str.isalnum, word)):
        return "sign"
    if IDENTIFIER.fullmatch(word) and not word[0].isdigit():
        return "identifier"
    if word[0].isupper() and len(word) > 1 and not ROMAN.fullmatch(word) and word.lower() not in present:
        return "name"
    return "word"


def _in_titles(units: Units) -> Bool[np.ndarray, " units"]:
    lines = units.text.split(b"\n")
    starts = np.cumsum([0, *(len(line) + 1 for line in lines[:-1])])
    texts = [line.strip().decode("utf-8", "replace") if len(line) < 4 * LONGEST_TITLE else "x" * 99 for line in lines]
    padded = ["", *texts, ""]
    titles = np.array([is_title(text, not padded[i] and not padded[i + 2]) for i, text in enumerate(texts)], bool)
    return titles[np.searchsorted(starts, units.word, side="right") - 1]


def is_title(line: str, alone: bool) -> bool:
    """Whether a line looks like the title of a chapter; `alone`: between blank lines."""
    if not line or len(line) > LONGEST_TITLE:
        return False
    if NUMBERED_TITLE.match(line):
        return True
    return alone and (MARKED_TITLE.match(line) is not None or (line.isupper() and sum(map(str.isalpha, line)) > 2))


def _word_starts(text: bytes) -> Int[np.ndarray, " words"]:
    """The beginnings of the words in the text, in bytes; of an empty text: 0."""
    # Each byte that is not UTF-8 becomes one character, which becomes that byte again.
    words = WORD.findall(text.decode("utf-8", "surrogateescape"))
    lengths = [len(word) if word.isascii() else len(word.encode("utf-8", "surrogateescape")) for word in words]
    return np.cumsum([0, *lengths[:-1]])
