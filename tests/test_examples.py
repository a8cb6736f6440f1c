"""The examples run, at a smaller size."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from meliad_like.errors import UserError

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = [
    f"DecoderConfig.{name} = {value}"
    for name, value in {
        "num_layers": 2,
        "model_width": 16,
        "num_heads": 2,
        "head_size": 8,
        "feedforward_width": 16,
        "window_length": 32,
    }.items()
]
SMALL += ["ReaderConfig.segment_length = 32", "ReaderConfig.tokens_per_step = 32"]


def load_example(name):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def alphageometry():
    return load_example("alphageometry")


@pytest.fixture(scope="module")
def prover_model(alphageometry, tmp_path_factory):
    checkpoint = alphageometry.make_random_checkpoint(tmp_path_factory.mktemp("alphageometry"), SMALL)
    return alphageometry.LanguageModelInference(checkpoint, beams=6, tokens=40)


def test_the_size_is_that_of_alphageometry(alphageometry):
    from meliad_like import config

    model = config.parse(alphageometry.FILES, alphageometry.PARAMS).model
    sizes = (model.total_layers, model.model_width, model.num_heads, model.head_size, model.window_length)
    assert sizes == (12, 1024, 8, 128, 1024)


@pytest.mark.thorough
def test_the_prover_gets_its_sequences(alphageometry, prover_model):
    # Nearly all words end a construction, because a random model would not say the one word.
    words = [word for word in alphageometry.WORDS if word not in "abc"]
    outputs = prover_model.beam_decode(alphageometry.PROBLEM, eos_tokens=words, mask_tokens=["d", "{S}"])
    assert len(outputs["seqs_str"]) == len(outputs["dstate"]) > 1
    assert outputs["scores"] == sorted(outputs["finished_scores"])
    ends, masked = set(prover_model.encode_list(words)), set(prover_model.encode_list(["d", "{S}"]))
    for tokens, text in zip(outputs["finished_seqs"], outputs["seqs_str"], strict=True):
        assert tokens[-1] in ends and not set(tokens) & masked
        assert prover_model.lm.vocabulary.encode(text).tolist() == tokens
    # The state of the best sequence is that of the problem with it.
    added = prover_model.beam_decode("x00", dstate=outputs["dstate"][-1])
    whole = prover_model.beam_decode(f"{alphageometry.PROBLEM} {outputs['seqs_str'][-1]} x00")
    assert added["finished_seqs"] == whole["finished_seqs"]
    np.testing.assert_allclose(added["scores"], whole["scores"], atol=1e-5)


def test_the_program(alphageometry, monkeypatch, capsys):
    changes = [f"--gin_param={binding}" for binding in SMALL]
    monkeypatch.setattr("sys.argv", ["alphageometry.py", "--beams=4", "--tokens=30", *changes])
    alphageometry.main()
    first, *sequences, last = capsys.readouterr().out.splitlines()
    assert first == "The weights are random: these are no constructions."
    assert last == f"{len(sequences)} of 4 sequences ended within 30 tokens" and sequences


def test_an_end_of_several_tokens_is_named(alphageometry, prover_model):
    with pytest.raises(UserError, match="'a b' has 2 tokens, and must be one"):
        prover_model.beam_decode(alphageometry.PROBLEM, eos_tokens=["a b"])
