import argparse
import io
import textwrap
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from meliad_like.errors import UserError
from meliad_like.vocabularies.base import (
    BytesVocabularyConfig,
    ByteVocabulary,
    load_vocabulary,
    utf8_decoder,
)
from meliad_like.vocabularies.sentencepiece import SentencePieceVocabulary, SentencePieceVocabularyConfig

TEXTS = [Path(module.__file__).read_text() for module in (argparse, textwrap)]
HARD = [
    "",
    " ",
    "\n",
    "  a\n\n\tb  \u2581\u2581x\u2581",
    "\uff21e\u0301 \u6f22 \U0001f600",
    "\x00</s><0x41>\ufeff\r\n ",
    "a\u00a0b",
    "  a\n\n\tb  \uff21e\u0301\u2581\u6f22 \U0001f600\x00\r\n <|endoftext|> 123,456 ",
]


def trained(**settings):
    return SentencePieceVocabularyConfig(size=500, **settings).make(TEXTS)


@pytest.fixture(scope="module", params=["bytes", "unigram", "bpe"])
def vocabulary(request):
    return ByteVocabulary() if request.param == "bytes" else trained(model_type=request.param)


@pytest.fixture(scope="module")
def foreign_model():
    """A model as others train them: normalised, without bytes, without an end."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS[1].splitlines()),
        model_writer=model,
        vocab_size=200,
        eos_id=-1,
        bos_id=-1,
        minloglevel=2,
    )
    return model.getvalue()


@pytest.mark.parametrize("text", [*HARD, TEXTS[1]])
def test_text_comes_back(vocabulary, text):
    assert vocabulary.restores(text, vocabulary.encode(text))


def test_lossless(vocabulary):
    assert vocabulary.lossless


def test_ids(vocabulary):
    ids = vocabulary.encode(TEXTS[0])
    assert ids.dtype == np.int32
    assert ids.min() >= 0 and ids.max() < vocabulary.size
    assert vocabulary.end_of_document not in ids
    assert vocabulary.decode_bytes([*ids, vocabulary.end_of_document]) == TEXTS[0].encode()


def test_stream_gives_whole_characters(vocabulary):
    text = "é \u6f22\U0001f600."
    decoder = utf8_decoder()
    parts = [decoder.decode(vocabulary.decode_bytes([token])) for token in vocabulary.encode(text)]
    assert "".join(parts) + decoder.decode(b"", final=True) == text
    assert "\ufffd" not in "".join(parts)


def test_stream_that_ends_within_a_character(vocabulary):
    decoder = utf8_decoder()
    for token in vocabulary.encode("\U0001f600")[:-1]:
        assert decoder.decode(vocabulary.decode_bytes([token])) == ""
    assert decoder.decode(b"", final=True) == "\ufffd"


def test_save_and_load(vocabulary, tmp_path):
    vocabulary.save(tmp_path)
    loaded = load_vocabulary(tmp_path)
    assert loaded.fingerprint == vocabulary.fingerprint
    assert (loaded.encode(TEXTS[1]) == vocabulary.encode(TEXTS[1])).all()


def test_byte_ids():
    assert ByteVocabulary().encode("aé").tolist() == [97, 195, 169]
    assert (ByteVocabulary().size, ByteVocabulary().end_of_document) == (257, 256)


def test_size_multiple():
    padded = BytesVocabularyConfig(size_multiple=128).make()
    assert padded.size == 384
    assert padded.decode_bytes([65, 300, 66]) == b"AB"
    assert padded.fingerprint != ByteVocabulary().fingerprint


@pytest.mark.parametrize("token", [-1, 257])
def test_token_out_of_range(token):
    with pytest.raises(UserError, match=f"token {token} is out of range for a vocabulary of 257"):
        ByteVocabulary().decode([65, token])


def test_training_size_and_repeatability():
    first, second = trained(), trained()
    assert first.size == 500 and first.end_of_document == 1
    assert first.fingerprint == second.fingerprint


def test_pieces_span_whitespace():
    assert len(trained(model_type="bpe").encode("    return")) < 4


def test_a_large_text_is_encoded_in_pieces(monkeypatch):
    vocabulary, text = trained(model_type="bpe"), TEXTS[0] + "\u2581" + TEXTS[1]
    whole = vocabulary.encode(text)
    monkeypatch.setattr("meliad_like.vocabularies.base.PIECE", 1000)
    assert max(map(len, vocabulary.pieces(text))) < 1500
    np.testing.assert_array_equal(vocabulary.encode(text), whole)
    assert vocabulary.restores(text, whole) and not vocabulary.restores(text, whole[:-1])
    assert not vocabulary.restores(text, np.append(whole, whole[-1:]))


def test_numbers_with_a_token_for_every_digit():
    texts = [text + "\n1234567 in 1234567\n" for text in TEXTS]
    vocabulary = SentencePieceVocabularyConfig(size=500, split_digits=True).make(texts)
    assert [vocabulary.decode([token]) for token in vocabulary.encode("1234567")] == list("1234567")


def test_ctrl_c_while_the_texts_are_read():
    def texts():
        yield TEXTS[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        SentencePieceVocabularyConfig(size=500).make(texts())


def test_too_large_for_the_texts():
    with pytest.raises(UserError, match="SentencePieceVocabularyConfig.size = 30000: Vocabulary size too high"):
        SentencePieceVocabularyConfig(size=30_000).make(TEXTS)


def test_loaded_model_gets_an_end_and_decodes_as_sentencepiece(foreign_model, tmp_path):
    path = tmp_path / "foreign.model"
    path.write_bytes(foreign_model)
    vocabulary = SentencePieceVocabularyConfig(model_file=str(path)).make()
    assert (vocabulary.size, vocabulary.end_of_document) == (201, 200)
    assert not vocabulary.lossless
    text = "The parser  \u6f22 list"
    processor = sentencepiece.SentencePieceProcessor(model_proto=foreign_model)
    assert vocabulary.encode(text).tolist() == processor.encode(text)
    assert vocabulary.decode([*processor.encode(text), 200]) == processor.decode(processor.encode(text))


def test_settings_fingerprint_follows_the_model_file(foreign_model, tmp_path):
    path = tmp_path / "a.model"
    config = SentencePieceVocabularyConfig(model_file=str(path))
    path.write_bytes(foreign_model)
    before = config.settings_fingerprint
    trained().save(tmp_path)
    path.write_bytes((tmp_path / "sentencepiece.model").read_bytes())
    assert config.settings_fingerprint != before


def test_padding_follows_the_end(foreign_model):
    assert SentencePieceVocabulary(foreign_model, size_multiple=64).size == 256


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"model_type": "char"}, "model_type='char' is not one of unigram, bpe"),
        ({"size_multiple": 0}, "size_multiple=0 must be at least 1"),
        (
            {"model_file": "/no.model"},
            "cannot read /no.model: No such",
        ),
        ({"model_file": __file__}, "test_vocabulary.py is damaged, or no SentencePiece model"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(UserError, match=message):
        SentencePieceVocabularyConfig(**settings).make()


def test_folder_without_vocabulary(tmp_path):
    with pytest.raises(UserError, match=r"no vocabulary in .*: vocabulary.json is missing"):
        load_vocabulary(tmp_path)
