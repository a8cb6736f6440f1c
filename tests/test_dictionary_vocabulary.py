"""Whole words in fairseq's dictionary format."""

import pytest

from meliad_like.data.preparation import prepare
from meliad_like.errors import UserError
from meliad_like.sources.files import TextSource
from meliad_like.vocabularies.base import load_vocabulary
from meliad_like.vocabularies.dictionary import (
    DictionaryVocabulary,
    DictionaryVocabularyConfig,
    make_dictionary,
    read_dictionary,
)

DICTIONARY = "the 9\nrose 4\n, 4\n@-@ 1\n"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "dict.txt"
    # Some programs for Windows begin a file with a byte order mark.
    path.write_text(f"\ufeff{DICTIONARY}", encoding="utf-8")
    return path


def test_ids_are_fairseqs(file):
    vocabulary = DictionaryVocabularyConfig(model_file=str(file)).make()
    assert (vocabulary.size, vocabulary.end_of_document) == (8, 2)
    # Four specials, then the lines. Blank lines are ends of lines; the last line's end is that of the document.
    assert vocabulary.encode(" the rose , \n \n the thorn \n").tolist() == [4, 5, 6, 2, 2, 4, 3]
    assert vocabulary.decode([4, 5, 6, 2, 3, 2]) == "the rose , \n<unk> \n"
    assert not vocabulary.lossless
    # Control tokens are read as any other word that is not in the dictionary.
    assert vocabulary.encode("the </s> <pad> <s> <unk>").tolist() == [4, 3, 3, 3, 3]


def test_what_is_saved_is_what_was_read(file, tmp_path):
    vocabulary = DictionaryVocabulary(read_dictionary(file), 16)
    (tmp_path / "saved").mkdir()
    vocabulary.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "dict.txt").read_text() == DICTIONARY
    loaded = load_vocabulary(tmp_path / "saved")
    assert (loaded.fingerprint, loaded.size) == (vocabulary.fingerprint, 16)
    assert loaded.fingerprint != DictionaryVocabulary(read_dictionary(file)).fingerprint
    assert load_vocabulary(tmp_path / "saved").encode("the the\n").tolist() == [4, 4]


def test_counted_words_are_ranked_and_filled_up():
    counts = make_dictionary(["b a <unk> b\n", "c a b"])
    assert counts == [("b", 3), ("a", 2), ("c", 1), ("madeupword0000", 0)]
    assert DictionaryVocabulary(counts).encode("a <unk> c").tolist() == [5, 3, 6]


def test_documents_become_fairseqs_stream(tmp_path):
    (tmp_path / "documents" / "train").mkdir(parents=True)
    for name, text in (("1", "a b\na\n"), ("2", "a\n\nc\n")):
        (tmp_path / "documents" / "train" / f"{name}.txt").write_text(text)
    source = TextSource(folder=str(tmp_path / "documents"))
    config = DictionaryVocabularyConfig()
    store = prepare(source, config, tmp_path / "store", num_workers=1)
    store.check_settings(source, config)
    stream = store.split("train").concatenated(store.vocabulary.end_of_document)
    assert stream.tokens(0, 0, int(stream.lengths[0])).tolist() == [2, 4, 5, 2, 4, 2, 4, 2, 2, 6, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("the 9\nrose\n", "dict.txt:2: 'rose' is not a word and its count"),
        ("the nine\n", "dict.txt:1: 'the nine' is not a word and its count"),
        ("the 9\nthe 8\n", "dict.txt:2: the word 'the' is there twice"),
    ],
)
def test_a_bad_line_is_named(file, text, message):
    file.write_text(text)
    with pytest.raises(UserError, match=message):
        read_dictionary(file)


def test_a_missing_dictionary(tmp_path):
    with pytest.raises(UserError, match="cannot read .*none.txt: No such file"):
        read_dictionary(tmp_path / "none.txt")
