"""Byte-level BPE vocabularies, from each of the forms in which models carry them."""

import json

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer

from meliad_like.data.tokenizers_vocabulary import (
    TOKENIZER_NAME,
    TokenizersVocabularyConfig,
    _byte_characters,
    read_tokenizer,
)
from meliad_like.data.vocabulary import load_vocabulary
from meliad_like.errors import UserError

TEXTS = ["the other tether", "  a\n\n\tb \x00 漢\U0001f600\r\n", "", "year 1984", "say <|endoftext|> and go on"]
MERGES = ["t h", "th e", "Ġ the", "e r", "1 9"]


@pytest.fixture
def folder(tmp_path):
    """vocab.json and merges.txt as GPT-2 has them: bytes, merges, and the end of a text last."""
    tokens = [*_byte_characters().values(), *(merge.replace(" ", "") for merge in MERGES), "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *MERGES, ""]))
    return tmp_path


def config(path, **fields):
    return TokenizersVocabularyConfig(model_file=str(path), **fields)


def write_gguf(folder, path, **metadata):
    tokens = list(json.loads((folder / "vocab.json").read_text()))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(metadata.get("model", "gpt2"))
    if pre := metadata.get("pre", "smollm"):
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token == "<|endoftext|>" else 1 for token in tokens])
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_merges_and_text_that_comes_back(folder):
    vocabulary = config(folder).make()
    assert vocabulary.lossless
    assert vocabulary.size == 256 + len(MERGES) + 1
    assert vocabulary.end_of_document == vocabulary.size - 1
    pieces = [vocabulary.decode([token]) for token in vocabulary.encode("the other tether")]
    assert pieces == ["the", " ", "o", "the", "r", " ", "t", "e", "the", "r"]
    for text in TEXTS:
        ids = vocabulary.encode(text)
        assert vocabulary.decode(ids) == text
        assert vocabulary.decode_bytes(ids) == text.encode()
        # Text can't end a document, whatever it looks like.
        assert vocabulary.end_of_document not in ids
    assert vocabulary.decode([vocabulary.end_of_document]) == ""


def test_a_tokenizer_json_is_the_same(folder, tmp_path):
    tokenizer, end = read_tokenizer(folder)
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / TOKENIZER_NAME).write_text(tokenizer)
    for place in (tmp_path / "saved", tmp_path / "saved" / TOKENIZER_NAME):
        ours, theirs = config(place).make(), Tokenizer.from_str(tokenizer)
        assert ours.fingerprint == config(folder).make().fingerprint
        for text in TEXTS[:4]:
            assert ours.encode(text).tolist() == theirs.encode(text).ids
    assert end == "<|endoftext|>"


def test_a_tokenizer_json_that_does_not_say_what_it_is(folder, tmp_path):
    # As GPT-2's own, and others of its time.
    saved = json.loads(read_tokenizer(folder)[0])
    del saved["model"]["type"]
    (tmp_path / TOKENIZER_NAME).write_text(json.dumps(saved))
    ours = config(tmp_path / TOKENIZER_NAME).make()
    np.testing.assert_array_equal(ours.encode(TEXTS[0]), config(folder).make().encode(TEXTS[0]))
    del saved["decoder"]
    (tmp_path / TOKENIZER_NAME).write_text(json.dumps(saved))
    with pytest.raises(UserError, match="is BPE with decoder None, not a byte-level BPE"):
        config(tmp_path / TOKENIZER_NAME).make()


def test_no_document_is_cut_or_filled(folder, tmp_path):
    tokenizer = Tokenizer.from_str(read_tokenizer(folder)[0])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=6)
    (tmp_path / TOKENIZER_NAME).write_text(tokenizer.to_str())
    vocabulary = config(tmp_path / TOKENIZER_NAME).make()
    assert vocabulary.decode(vocabulary.encode(TEXTS[0])) == TEXTS[0]
    assert len(vocabulary.encode("a")) == 1


def test_saved_with_a_store_and_loaded(folder, tmp_path):
    vocabulary = config(folder, size_multiple=8, end_token="Ġthe").make()
    (tmp_path / "store").mkdir()
    vocabulary.save(tmp_path / "store")
    loaded = load_vocabulary(tmp_path / "store")
    assert (loaded.fingerprint, loaded.size, loaded.end_of_document) == (vocabulary.fingerprint, 264, 258)
    assert loaded.fingerprint != config(folder).make().fingerprint


def test_of_a_gguf_file(folder, tmp_path):
    path = write_gguf(folder, tmp_path / "model.gguf")
    vocabulary = config(path).make()
    assert vocabulary.lossless
    plain = config(folder).make()
    assert vocabulary.end_of_document == plain.end_of_document
    np.testing.assert_array_equal(vocabulary.encode(TEXTS[0]), plain.encode(TEXTS[0]))
    # Digits stay apart, as the model's own tokenizer has it, although a merge would join them.
    assert [plain.decode([i]) for i in plain.encode("1984")] == ["19", "8", "4"]
    assert [vocabulary.decode([i]) for i in vocabulary.encode("1984")] == ["1", "9", "8", "4"]


def test_what_is_refused(folder, tmp_path):
    def refused(path, message, **fields):
        with pytest.raises(UserError, match=message):
            config(path, **fields).make()

    named = read_tokenizer(folder)[0].replace("<|endoftext|>", "<end>")
    refused(folder, "no token 'stop': set TokenizersVocabularyConfig.end_token", end_token="stop")
    refused(tmp_path / "nowhere", "cannot read .*nowhere: No such file")
    refused(write_gguf(folder, tmp_path / "a.gguf", pre="qwen2"), "can't honour its tokenizer 'gpt2' .* 'qwen2'")
    refused(write_gguf(folder, tmp_path / "b.gguf", model="llama"), "can't honour its tokenizer 'llama'")
    refused(write_gguf(folder, tmp_path / "c.gguf", pre=""), "can't honour its tokenizer 'gpt2' .* 'default'")
    (folder / "merges.txt").write_text("t q\n")
    refused(folder, "merges.txt: the merge 't q' is not of tokens of its vocabulary")
    (folder / "merges.txt").write_bytes(b"\xff\xfe")
    refused(folder, "merges.txt is damaged, or no tokenizer: 'utf-8' codec")
    (tmp_path / TOKENIZER_NAME).write_text(named)
    refused(
        tmp_path / TOKENIZER_NAME,
        "the tokenizer doesn't say which token ends a text: set TokenizersVocabularyConfig.end_",
    )
    (tmp_path / TOKENIZER_NAME).write_text("{}")
    refused(tmp_path / TOKENIZER_NAME, "tokenizer.json is not a tokenizer.json")
    with pytest.raises(UserError, match="needs a TokenizersVocabularyConfig.model_file"):
        config("")
