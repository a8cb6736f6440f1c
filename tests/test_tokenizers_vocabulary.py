"""BPE vocabularies of pretrained models, of bytes and of characters."""

import json

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from meliad_like.conversion.pretrained import export_tokenizer
from meliad_like.conversion.published.folder import token_before_texts
from meliad_like.errors import UserError
from meliad_like.run.text import encode_text
from meliad_like.vocabularies.base import load_vocabulary
from meliad_like.vocabularies.tokenizers import (
    BYTE_CHARACTERS,
    TOKENIZER_NAME,
    TokenizersVocabulary,
    TokenizersVocabularyConfig,
    read_tokenizer,
)

# Characters that vocabularies often change: whitespace, composed and rare characters, digits.
PROBE = "  a\n\n\tb  \uff21e\u0301\u2581\u6f22 \U0001f600\x00\r\n <|endoftext|> 123,456 "
TEXTS = ["the other tether", "  a\n\n\tb \x00 漢\U0001f600\r\n", "", "year 1984", "say <|endoftext|> and go on", PROBE]
MERGES = ["t h", "th e", "Ġ the", "e r", "1 9"]


@pytest.fixture
def folder(tmp_path):
    """A tokenizer as GPT-2's: bytes, merges, and the end of a text last."""
    tokens = [*BYTE_CHARACTERS, *(merge.replace(" ", "") for merge in MERGES)]
    pairs = [tuple(merge.split(" ")) for merge in MERGES]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    (tmp_path / "folder").mkdir()
    tokenizer.save(str(tmp_path / "folder" / TOKENIZER_NAME), pretty=False)
    return tmp_path / "folder"


def config(path, **fields):
    return TokenizersVocabularyConfig(model_file=str(path), **fields)


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
    plain = config(folder).make().fingerprint
    tokenizer = Tokenizer.from_file(str(folder / TOKENIZER_NAME))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / TOKENIZER_NAME))
    vocabulary = config(folder, size_multiple=8, end_token="<end>", stop_tokens=(3,)).make()
    (tmp_path / "store").mkdir()
    vocabulary.save(tmp_path / "store")
    loaded = load_vocabulary(tmp_path / "store")
    assert (loaded.fingerprint, loaded.size, loaded.end_tokens) == (vocabulary.fingerprint, 264, (262, 3))
    assert loaded.fingerprint != plain


def changed(folder, change):
    """The vocabulary of a tokenizer after a change of it, and the tokenizer."""
    tokenizer = Tokenizer.from_str(read_tokenizer(folder)[0])
    change(tokenizer)
    return TokenizersVocabulary(tokenizer.to_str(), "<|endoftext|>"), tokenizer


def prefix(tokenizer):
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def lowercase(tokenizer):
    tokenizer.normalizer = normalizers.Lowercase()


def removing(tokenizer):
    split = pre_tokenizers.CharDelimiterSplit("-")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False)])


def adding(*tokens, **properties):
    return lambda tokenizer: tokenizer.add_tokens(
        [AddedToken(token, normalized=False, **properties) for token in tokens]
    )


CHANGING = {
    "hi  \n <user>\n\nthere": adding("<user>", lstrip=True),
    "A": lowercase,
    "a-b": removing,
    "鿿é": adding("é"),
}


@pytest.mark.parametrize("text", CHANGING)
def test_lossless_says_whether_any_text_changes(folder, text):
    vocabulary, _ = changed(folder, CHANGING[text])
    assert not vocabulary.lossless
    assert not vocabulary.restores(text, vocabulary.encode(text))
    assert vocabulary.restores("the other", vocabulary.encode("the other"))


@pytest.mark.parametrize("change", [prefix, adding("<user>", "  ", "ab c"), adding("<user>", single_word=True)])
def test_lossless_tokenizers(folder, change):
    vocabulary, _ = changed(folder, change)
    assert vocabulary.lossless
    for text in (
        *TEXTS,
        "  a\n\n\tb  \uff21e\u0301\u2581\u6f22 \U0001f600\x00\r\n <|endoftext|> 123,456 ",
        "abc",
        "hi  <user>\n\nthere",
        "ab cd",
    ):
        assert vocabulary.restores(text, vocabulary.encode(text))
    # What is read in two parts is what is read at once.
    assert vocabulary.decode([*vocabulary.encode("ab"), *vocabulary.encode("cd")]) == "abcd"


def test_a_text_always_has_the_same_tokens(folder):
    def drop(tokenizer):
        tokenizer.model.dropout = 0.5

    vocabulary, tokenizer = changed(folder, drop)
    assert {tuple(vocabulary.encode("the")) for _ in range(50)} == {(257,)}
    # Its tokens were other ones, and the fingerprint says so; a file without such settings is as it was.
    assert export_tokenizer(vocabulary) != (tokenizer.to_str(), "<|endoftext|>")
    assert export_tokenizer(changed(folder, lambda _: None)[0]) == read_tokenizer(folder)


@pytest.mark.parametrize("named", [{}, {"unk_token": "<|endoftext|>"}, {"unk_token": "<unk>"}])
def test_a_prompt_without_tokens_is_refused(folder, named):
    saved = json.loads(read_tokenizer(folder)[0])
    del saved["model"]["vocab"]["Ð"]
    saved["model"]["vocab"]["<unk>"] = 300
    saved["model"] |= named
    vocabulary = TokenizersVocabulary(json.dumps(saved), "<|endoftext|>")
    assert not vocabulary.lossless
    assert vocabulary.end_of_document not in vocabulary.encode("naïve Привет")
    with pytest.raises(UserError, match="no token for 'П'"):
        encode_text(vocabulary, "naïve Привет")
    assert vocabulary.decode(encode_text(vocabulary, "naïve ⁇").tokens) == "naïve ⁇"


def test_the_end_of_a_document_is_in_no_text(folder):
    saved = json.loads(read_tokenizer(folder)[0])
    saved["added_tokens"][0]["special"] = False
    plain = TokenizersVocabulary(json.dumps(saved), "<|endoftext|>")
    ids = plain.encode("a<|endoftext|>b")
    assert plain.end_of_document not in ids
    assert plain.decode(ids) == "a<|endoftext|>b"


@pytest.mark.parametrize("named", ["the", {"content": "the"}])
def test_the_end_that_a_folder_names(folder, named):
    """Where the tokenizer has no <|endoftext|>."""
    tokenizer = read_tokenizer(folder)[0]
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": named}))
    assert read_tokenizer(folder) == (tokenizer, "<|endoftext|>")
    (folder / TOKENIZER_NAME).write_text(tokenizer.replace("<|endoftext|>", "<end>"))
    assert read_tokenizer(folder)[1] == "the"


@pytest.mark.parametrize("change", [lambda _: None, adding("the other", "  "), adding("and", rstrip=True), lowercase])
def test_a_long_text_is_encoded_in_pieces(folder, change, monkeypatch):
    vocabulary, _ = changed(folder, change)
    text = "".join(f"the other {i} and\n\n  é\u0301 THE x-{i}{'  ' * (i % 3)}tether, 漢字。\t" for i in range(300))
    whole = vocabulary.encode(text)
    lengths, encode = [], vocabulary._encode
    monkeypatch.setattr("meliad_like.vocabularies.base.PIECE", 1000)
    monkeypatch.setattr(vocabulary, "_encode", lambda text: lengths.append(len(text)) or encode(text))
    np.testing.assert_array_equal(vocabulary.encode(text), whole)
    assert max(lengths) < 1100


def of_characters(**changes):
    """A tokenizer as Gemma's, whose spaces are U+2581, and the vocabulary of it."""
    merges = [pair.split() for pair in ("t h", "th e", "\u2581 the", "\u2581 \u2581", "e r")]
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{i:02X}>" for i in range(256)), *"\u2581abehnort\n"]
    tokens += ["".join(pair) for pair in merges]
    model = models.BPE(
        {token: i for i, token in enumerate(tokens)},
        [tuple(pair) for pair in merges],
        byte_fallback=True,
        fuse_unk=True,
        unk_token="<unk>",
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    replaced = decoders.Replace("\u2581", " ")
    tokenizer.decoder = decoders.Sequence([replaced, decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(tokens[:4])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in ("\n\n", "\u2581\u2581")])
    saved = json.loads(tokenizer.to_str())
    saved["model"] |= changes
    return tokenizer, TokenizersVocabulary(json.dumps(saved), "<eos>")


def test_a_bpe_of_characters():
    tokenizer, vocabulary = of_characters()
    assert vocabulary.lossless and vocabulary.end_of_document == 1
    for text in (*TEXTS, "the other  tether\n\n the   é", "<0x41> <eos><bos>", "a\u2581\u2581b \u2581", " "):
        ids = vocabulary.encode(text)
        assert vocabulary.decode_bytes(ids) == text.encode()
        assert not set(ids) & {0, 1, 2, 3}
        if not any(part in text for part in ("\u2581", "<eos>")):
            assert ids.tolist() == tokenizer.encode(text).ids
            assert tokenizer.decode(ids) == text
    assert [vocabulary.decode([i]) for i in vocabulary.encode("the  the")] == ["the", " ", " the"]
    assert not of_characters(byte_fallback=False)[1].lossless


def test_the_token_that_begins_a_document(tmp_path):
    tokenizer, plain = of_characters()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    tokenizer.save(str(tmp_path / TOKENIZER_NAME))
    begin = token_before_texts(tmp_path)
    vocabulary = config(tmp_path / TOKENIZER_NAME, end_token="<eos>", begin_token=begin).make()
    assert vocabulary.encode("the other").tolist() == tokenizer.encode("the other").ids
    assert vocabulary.encode("the")[0] == 2 and vocabulary.decode(vocabulary.encode("the")) == "the"
    np.testing.assert_array_equal(vocabulary.encode_continuation("the"), plain.encode("the"))
    vocabulary.save(tmp_path)
    assert load_vocabulary(tmp_path).fingerprint == vocabulary.fingerprint != plain.fingerprint
    assert not vocabulary.writable[2]


def test_a_long_text_of_characters_is_encoded_in_pieces(monkeypatch):
    _, vocabulary = of_characters()
    text = "".join(f"the other {i} a\n\n  é the\u2581b-{i}{'  ' * (i % 3)}tether, 漢字。\t" for i in range(300))
    whole = vocabulary.encode(text)
    monkeypatch.setattr("meliad_like.vocabularies.base.PIECE", 1000)
    assert max(map(len, vocabulary.pieces(text))) < 1100
    np.testing.assert_array_equal(vocabulary.encode(text), whole)


def test_what_is_refused(folder, tmp_path):
    def refused(path, message, **fields):
        with pytest.raises(UserError, match=message):
            config(path, **fields).make()

    named = read_tokenizer(folder)[0].replace("<|endoftext|>", "<end>")
    refused(folder, "no token 'stop': set TokenizersVocabularyConfig.end_token", end_token="stop")
    refused(folder, "no token TokenizersVocabularyConfig.begin_token='begin'", begin_token="begin")
    refused(folder, "texts are encoded to the tokenizer's token 'Ġthe'", end_token="Ġthe")
    refused(tmp_path / "nowhere", "cannot read .*nowhere: No such file")
    refused(tmp_path, "tokenizer.json is missing: AutoTokenizer.from_pretrained")
    (tmp_path / TOKENIZER_NAME).write_bytes(b"\xff\xfe")
    refused(tmp_path, "tokenizer.json is damaged, or no tokenizer: 'utf-8' codec")
    (tmp_path / TOKENIZER_NAME).write_text(named)
    refused(
        tmp_path / TOKENIZER_NAME,
        "the tokenizer doesn't say which token ends a text: set TokenizersVocabularyConfig.end_",
    )
    (tmp_path / TOKENIZER_NAME).write_text("{}")
    refused(tmp_path / TOKENIZER_NAME, "tokenizer.json is not a tokenizer.json")
    with pytest.raises(UserError, match="needs a TokenizersVocabularyConfig.model_file"):
        config("")
