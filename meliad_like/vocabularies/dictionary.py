"""A vocabulary of whole words, in the dictionary format of fairseq: a word and its count in each line.

The text must already be split into words by spaces, like WikiText-103. The end of a line is a token, and that of the
last line is the end of the document, so that concatenated documents are the token stream of fairseq.
"""

import collections
from collections.abc import Iterable

import numpy as np
from etils import epath

from meliad_like.errors import UserError
from meliad_like.remote import any_path
from meliad_like.vocabularies.base import VOCABULARIES, FileVocabularyConfig, Vocabulary, read_text

DICTIONARY_NAME = "dict.txt"
# The ids 0 to 3, which the dictionary file does not contain.
SPECIALS = ("<s>", "<pad>", "</s>", "<unk>")
END_OF_LINE, UNKNOWN = 2, 3

Counts = list[tuple[str, int]]


@VOCABULARIES.register("dictionary")
class DictionaryVocabularyConfig(FileVocabularyConfig):
    """Whole words between spaces, by rank, from fairseq's dict.txt or counted in the training documents."""

    def make(self, texts: Iterable[str] = ()) -> Vocabulary:
        counts = make_dictionary(texts) if self.trained else read_dictionary(self.model_file)
        return DictionaryVocabulary(counts, self.size_multiple)


class DictionaryVocabulary(Vocabulary):
    """Words by rank. Other words become `<unk>`, and several spaces between words become one."""

    kind, file_name = "dictionary", DICTIONARY_NAME

    def __init__(self, counts: Counts, size_multiple: int = 1):
        """`counts`: the words and their numbers of occurrences, the most frequent first."""
        words = [word for word, _ in counts]
        pieces = [b"", b"", b"\n", b"<unk> ", *(word.encode() + b" " for word in words)]
        lines = "".join(f"{word} {count}\n" for word, count in counts)
        super().__init__(pieces, END_OF_LINE, size_multiple, lines, lossless=False)
        # Words that only fill the dictionary up occur in no document.
        self.writable[len(SPECIALS) : len(pieces)] = [count > 0 for _, count in counts]
        # The word <unk> in WikiText's text gets the id of the special token. The others are control tokens, which no
        # text is encoded to: the word </s> would end a line.
        self._ids = {word: i for i, word in enumerate(words, len(SPECIALS))} | {SPECIALS[UNKNOWN]: UNKNOWN}

    def encode(self, text: str) -> np.ndarray:
        ids = []
        for line in text.removesuffix("\n").split("\n"):
            ids += [self._ids.get(word, UNKNOWN) for word in line.split()]
            ids.append(END_OF_LINE)
        # The last line ends with the document.
        return np.asarray(ids[:-1], np.int32)


def read_dictionary(path: epath.PathLike) -> Counts:
    """The words and counts of a fairseq dictionary, in its order; `path` is the file, or a folder with dict.txt."""
    path = any_path(path)
    path = path / DICTIONARY_NAME if path.is_dir() else path
    lines = read_text(path, "dictionary").split("\n")
    counts: dict[str, int] = {}
    for number, line in enumerate(lines if lines[-1] else lines[:-1], 1):
        word, _, count = line.removesuffix(" #fairseq:overwrite").rpartition(" ")
        if not word or not count.isdecimal():
            raise UserError(f"{path}:{number}: {line!r} is not a word and its count")
        if word in counts:
            raise UserError(f"{path}:{number}: the word {word!r} is there twice")
        counts[word] = int(count)
    return list(counts.items())


def make_dictionary(texts: Iterable[str]) -> Counts:
    """The dictionary of these texts: their words by falling frequency, and alphabetically for equal frequencies.

    As in fairseq, placeholder words fill it up to a multiple of 8 ids.
    """
    counter = collections.Counter(word for text in texts for word in text.split())
    counter.pop(SPECIALS[UNKNOWN], None)
    counts = sorted(counter.items(), key=lambda item: (-item[1], item[0]))
    missing = -(len(SPECIALS) + len(counts)) % 8
    return [*counts, *((f"madeupword{i:04d}", 0) for i in range(missing))]
