"""Folders for transformers: our weights and our tokens, as we, `tokenizers` and transformers itself read them back."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from pretrained_models import LLAMA_CONFIG
from tokenizers import Tokenizer

import meliad_like
from meliad_like.config import RunConfig
from meliad_like.conversion.parameters import write_checkpoint
from meliad_like.conversion.pretrained import convert_to_huggingface
from meliad_like.models.model import Model
from meliad_like.vocabularies.base import ByteVocabulary
from meliad_like.vocabularies.dictionary import DictionaryVocabulary
from meliad_like.vocabularies.sentencepiece import SentencePieceVocabularyConfig

GUIDE = Path(__file__).parent.parent / "docs" / "guide.md"
TEXT = (
    "def read(text):\n\t# Über 1,200  tokens, 漢字 \U0001f600\n    return  text <|endoftext|></s><0x0A><unk>\u2581\r\n"
)


def sentencepiece(model_type):
    return SentencePieceVocabularyConfig(size=600, model_type=model_type).make([GUIDE.read_text("utf-8")])


VOCABULARIES = {
    "bytes": lambda: ByteVocabulary(),
    "bytes and unused ids": lambda: ByteVocabulary(8),
}


def export(vocabulary, tmp_path):
    """The folder for transformers of a random model with this vocabulary, and what it was made of."""
    model = Model(LLAMA_CONFIG, vocabulary.size)
    params = jax.tree.map(lambda x: 5 * x, model.init(jax.random.key(0)))
    write_checkpoint(tmp_path / "ours", params, RunConfig(model=LLAMA_CONFIG), vocabulary)
    convert_to_huggingface(tmp_path / "ours", tmp_path / "theirs")
    return tmp_path / "theirs"


@pytest.fixture(params=VOCABULARIES)
def exported(request, tmp_path):
    vocabulary = VOCABULARIES[request.param]()
    return vocabulary, export(vocabulary, tmp_path)


def test_tokens_are_the_same(exported):
    vocabulary, folder = exported
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    tokens = tokenizer.encode(TEXT).ids
    assert tokens == vocabulary.encode(TEXT).tolist()
    assert tokenizer.decode(tokens) == TEXT
    assert tokenizer.token_to_id("<|endoftext|>") in (None, vocabulary.end_of_document)


def test_ids_without_a_token_are_suppressed(exported):
    """transformers reads this file when it writes texts."""
    vocabulary, folder = exported
    path, unused = folder / "generation_config.json", range(257, vocabulary.size)
    if vocabulary.kind == "bytes" and unused:
        expected = {"bos_token_id": 256, "eos_token_id": 256, "suppress_tokens": [*unused]}
        assert json.loads(path.read_text()) == expected
    else:
        assert not path.exists()


def test_we_read_it_back(exported, tmp_path):
    vocabulary, folder = exported
    ours, again = meliad_like.load(tmp_path / "ours"), meliad_like.load(folder)
    assert again.vocabulary.fingerprint == vocabulary.fingerprint
    assert again.score(TEXT).bits_per_byte == ours.score(TEXT).bits_per_byte


UNREADABLE = (lambda: sentencepiece("unigram"), lambda: sentencepiece("bpe"), lambda: DictionaryVocabulary([("a", 2)]))


@pytest.mark.parametrize("make", UNREADABLE)
def test_what_transformers_cannot_read_is_said(make, tmp_path, capsys):
    vocabulary = make()
    folder = export(vocabulary, tmp_path)
    assert "only we read it back" in capsys.readouterr().out
    assert not (folder / "tokenizer.json").exists()
    assert meliad_like.load(folder).vocabulary.fingerprint == vocabulary.fingerprint


def test_transformers_reads_it(exported):
    """Where transformers is installed."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    vocabulary, folder = exported
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer.encode(TEXT.replace("<|endoftext|>", ""))
    assert tokens == vocabulary.encode(tokenizer.decode(tokens)).tolist()
    assert tokenizer.eos_token_id == vocabulary.end_of_document
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        logits = torch.log_softmax(model(torch.tensor([tokens[:20]])).logits[0], dim=-1).numpy()
    expected = np.take_along_axis(logits[:-1], np.array(tokens[1:20])[:, None], axis=1)[:, 0]
    found = meliad_like.load(folder).score(tokens[:20]).log_probabilities[1:]
    np.testing.assert_allclose(found, expected, atol=1e-5)
