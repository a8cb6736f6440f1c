"""Checkpoints of fairseq, as far as they can be tested without PyTorch; and with it, where it is installed."""

import argparse
import dataclasses
import sys

import jax
import numpy as np
import pytest
from golden_shortformer import CONFIG, THEIRS

from meliad_like import config
from meliad_like.conversion import fairseq
from meliad_like.conversion.fairseq import from_fairseq
from meliad_like.conversion.meliad import convert_from_meliad
from meliad_like.data.dictionary_vocabulary import DictionaryVocabularyConfig
from meliad_like.errors import UserError
from meliad_like.models.model import Model
from meliad_like.run.opening import open_checkpoint

# Learned parameters, and what else a state dict of fairseq has: the flags of its modules.
BUFFERS = ("version", "embed_positions._float_tensor", "embed_tokens._float_tensor", "adaptive_softmax.version",
           "adaptive_softmax.head._float_tensor")  # fmt: skip
STATE = THEIRS | {f"decoder.{name}": np.ones(1, np.float32) for name in BUFFERS}


@pytest.fixture
def run(tmp_path):
    """Of the golden model, with a dictionary of its 60 words."""
    (tmp_path / "dict.txt").write_text("".join(f"word{i} {60 - i}\n" for i in range(56)))
    vocabulary = DictionaryVocabularyConfig(model_file=str(tmp_path / "dict.txt"))
    run = config.parse(["shortformer/infused_cache.gin"], ["ReaderConfig.tokens_per_step = 4096"])
    return dataclasses.replace(run, model=CONFIG, vocabulary=vocabulary)


def test_a_checkpoint_becomes_a_folder_of_ours(run, tmp_path, monkeypatch):
    monkeypatch.setattr(fairseq, "read_fairseq", lambda path: STATE)
    folder = tmp_path / "ours" / "checkpoints"
    fairseq.convert_from_fairseq("theirs.pt", run, folder)
    opened = open_checkpoint(folder)
    assert (opened.run.model, opened.vocabulary.size) == (CONFIG, 60)
    jax.tree.map(np.testing.assert_array_equal, opened.params, from_fairseq(THEIRS, Model(CONFIG, 60).abstract_params))
    with pytest.raises(UserError, match=r"has checkpoints already \(step 0\): choose another --output"):
        fairseq.convert_from_fairseq("theirs.pt", run, folder)


def test_what_does_not_fit_is_named(run, tmp_path):
    with pytest.raises(UserError, match="a checkpoint of fairseq is a Shortformer: add --gin_file=shortformer"):
        fairseq.convert_from_fairseq("theirs.pt", config.parse(), tmp_path)
    counted = dataclasses.replace(run, vocabulary=DictionaryVocabularyConfig())
    with pytest.raises(UserError, match="has the words of its own dict.txt: set FileVocabularyConfig.model_file"):
        fairseq.convert_from_fairseq("theirs.pt", counted, tmp_path)


def test_pytorch_is_asked_for_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UserError, match=r"needs PyTorch: pip install 'meliad_like\[fairseq\]'"):
        fairseq.read_fairseq("theirs.pt")


class _Program:
    def __reduce__(self):
        return (print, ("a program in the file was run",))


def test_a_file_is_read_and_not_run(tmp_path, capsys):
    torch = pytest.importorskip("torch")
    model = {name: torch.tensor(array).half() for name, array in STATE.items()}
    torch.save({"args": argparse.Namespace(arch="transformer_lm_wiki103"), "model": model}, tmp_path / "theirs.pt")
    read = fairseq.read_fairseq(tmp_path / "theirs.pt")
    assert read.keys() == STATE.keys()
    for name, array in read.items():
        np.testing.assert_array_equal(array, STATE[name].astype(np.float16).astype(np.float32))
    torch.save({"model": model, "more": _Program()}, tmp_path / "bad.pt")
    with pytest.raises(UserError, match="bad.pt is damaged, or no checkpoint of weights and settings"):
        fairseq.read_fairseq(tmp_path / "bad.pt")
    assert "was run" not in capsys.readouterr().out


def test_a_shortformer_is_not_the_references(run, tmp_path):
    with pytest.raises(UserError, match="the reference has decoders alone, and this model is a shortformer"):
        convert_from_meliad("theirs.npz", run, tmp_path)
