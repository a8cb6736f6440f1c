"""The library: scores equal the evaluation's, states are kept and branched, folders of several kinds are opened."""

import io
import itertools
import re
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from families import BYTES, CONFIGS, FAMILIES, C, W, language_model
from ways import begin, decode

import meliad_like
from meliad_like.config import read_changes
from meliad_like.conversion.parameters import write_checkpoint
from meliad_like.data.split import Documents
from meliad_like.errors import UserError
from meliad_like.evaluation.perplexity import Evaluator
from meliad_like.library import LanguageModel
from meliad_like.mesh import MeshConfig, make_mesh

GUIDE = Path(__file__).parent.parent / "docs" / "guide.md"
TEXT = "A long document, of which every token is predicted from all before. " * 2


@pytest.fixture(scope="module", params=FAMILIES)
def lm(request):
    return language_model(FAMILIES[request.param])


@pytest.fixture(scope="module")
def states():
    return language_model(FAMILIES["lstm:dual"])


def test_scores_are_those_of_the_tokens_one_by_one(lm):
    score = lm.score(TEXT)
    assert np.isnan(score.log_probabilities[0]) and len(score.tokens) == len(TEXT) == score.num_bytes
    logits, _ = decode(lm.model, lm.params, score.tokens[None], begin(lm.model, lm.params, 1, decoding=True))
    expected = np.take_along_axis(jax.nn.log_softmax(logits[0, :-1]), score.tokens[1:, None], axis=1)[:, 0]
    np.testing.assert_allclose(score.log_probabilities[1:], expected, atol=1e-5)
    likely = np.argmax(logits[0, :-1], axis=-1)
    assert score.most_likely.tolist() == [False, *(likely == score.tokens[1:])]
    assert lm.score([*score.tokens[:-1], likely[-1]]).most_likely[-1]


@pytest.mark.parametrize("length", [1, 2, W, 3 * W + 1, C * W])
def test_a_text_in_two_parts_has_the_scores_of_the_whole(lm, length):
    whole, first = lm.score(TEXT), lm.score(TEXT[:length])
    second = lm.score(TEXT[length:], lm.read(TEXT[:length]))
    parts = np.concatenate([first.log_probabilities, second.log_probabilities])
    np.testing.assert_allclose(parts, whole.log_probabilities, atol=1e-5)
    assert second.state.num_tokens == len(TEXT)
    assert re.fullmatch(rf"State\(after {len(TEXT)} tokens, [\d,]+ bytes\)", repr(second.state))


def test_bits_per_byte_are_those_of_the_evaluation(states):
    tokens = np.append(BYTES.encode(TEXT), BYTES.end_of_document).astype(np.int32)
    numbers = (np.array([n]) for n in (len(tokens), len(TEXT), len(TEXT.split())))
    document = Documents(["text"], *numbers, read=lambda _, a, b: tokens[a:b], indices=np.arange(1))
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    evaluator = Evaluator(states.model, document, mesh, name="test", segment_length=C * W, max_lanes=1)
    assert states.score(tokens).bits_per_byte == pytest.approx(evaluator(states.params).bits_per_byte, abs=1e-6)


def test_a_state_is_continued_any_number_of_times(states, tmp_path):
    book = states.read(TEXT)
    once = states.generate(book, 20)
    states.read("something else", book)
    again = states.generate(book, 20)
    assert (again.text, again.tokens) == (once.text, once.tokens)
    assert states.generate(TEXT, 20).tokens == once.tokens
    assert states.generate(book, 20, seed=1).tokens != once.tokens
    assert "".join(piece.text for piece in states.stream(book, 20, chunk=3)) == once.text[: len(once.text)]
    book.save(tmp_path / "book.npz")
    assert states.generate(states.resume(tmp_path / "book.npz"), 20).tokens == once.tokens
    jax.tree.map(np.testing.assert_array_equal, states.resume(tmp_path / "book.npz").batch_of_one, book.batch_of_one)


@pytest.mark.thorough
def test_writing_is_compiled_once(tmp_path, caplog):
    opened = language_model(CONFIGS["lstm:dual"]).opened
    write_checkpoint(tmp_path / "checkpoints", opened.params, opened.run, opened.vocabulary)
    lm = meliad_like.load(tmp_path)
    book = lm.read(TEXT)
    book.save(tmp_path / "book.npz")
    for state, settings in itertools.product((book, lm.resume(tmp_path / "book.npz")), ({}, {"seed": 2})):
        jax.clear_caches()
        with caplog.at_level("WARNING"), jax.log_compiles():
            lm.generate(state, 30, **settings)
        assert caplog.text.count("Compiling jit(_write_tokens)") == 1
        caplog.clear()


LENGTHS = [0, 1, W + 1, 3 * W + 2, 2 * C * W + 3]
LONG = "".join(chr(97 + 7 * i % 26) for i in range(3 * C * W))


def of_some(*names):
    """Every family in the exhaustive tests, and these families always."""
    marked = [pytest.param(name, marks=() if name in names else pytest.mark.exhaustive) for name in FAMILIES]
    return pytest.mark.parametrize("lm", marked, indirect=True)


@of_some("lstm:dual")
def test_texts_of_a_batch_equal_themselves_alone(lm):
    """Texts of unequal lengths after states at unequal places."""
    texts = [LONG[:length] for length in LENGTHS]
    befores = lm.read_batch([LONG[-length - 1 :] for length in LENGTHS[::-1]])
    scores, states = lm.score_batch(texts, befores), lm.read_batch(texts, befores)
    # What is remembered is compared by what follows from it: keys of unit length amplify the rounding of short vectors.
    following = lm.score_batch([LONG[: 2 * W]] * len(texts), states)
    for text, before, score, state, after in zip(texts, befores, scores, states, following, strict=True):
        alone = lm.score(text, before.copy())
        np.testing.assert_allclose(score.log_probabilities, alone.log_probabilities, atol=1e-5)
        for other in (alone.state, score.state):
            assert state.num_tokens == other.num_tokens == before.num_tokens + len(text)
            np.testing.assert_allclose(
                after.log_probabilities, lm.score(LONG[: 2 * W], other).log_probabilities, atol=1e-5
            )
    written = lm.generate_batch(states, 2 * W, seeds=range(len(states)), stop_at_end=False)
    for number, (state, continuation) in enumerate(zip(states, written, strict=True)):
        assert lm.generate(state.copy(), 2 * W, seed=number, stop_at_end=False).tokens == continuation.tokens


def test_one_state_is_continued_once_for_each_seed(states):
    book = states.read(TEXT)
    many = states.generate_batch([book] * 4, 20, seeds=[3, 1, 4, 1])
    assert [one.tokens for one in many] == [states.generate(book, 20, seed=seed).tokens for seed in (3, 1, 4, 1)]
    assert many[1].tokens == many[3].tokens != many[0].tokens
    *_, last = states.stream_batch([book] * 4, 20, seeds=[3, 1, 4, 1])
    again = states.generate_batch([one.state for one in last], 10)
    for seed, one in zip((3, 1, 4, 1), again, strict=True):
        assert one.tokens == states.generate(book, 30, seed=seed).tokens[20:]


def test_texts_that_end_leave_their_states(states):
    """Texts of a batch end at different places, and each can be continued from its own."""
    opened, end = states.opened, BYTES.end_of_document
    embedding = np.array(opened.params["embedding"])
    embedding[end] *= 3
    likely = LanguageModel(opened._replace(params=opened.params | {"embedding": embedding}))
    book = likely.read(TEXT)
    many = likely.generate_batch([book] * 6, 60, seeds=range(6))
    lengths = [len(one.tokens) for one in many]
    assert len(set(lengths)) > 2 and min(lengths) < 60
    for seed, one in enumerate(many):
        alone = likely.generate(book, 60, seed=seed)
        assert (one.tokens, one.text) == (alone.tokens, alone.text)
        assert max(one.state.difference(alone.state).values()) < 1e-5
        assert (
            likely.generate(likely.read("And", one.state), 5).tokens
            == likely.generate(likely.read("And", alone.state), 5).tokens
        )


@of_some("feedback")
def test_hidden_states_of_every_layer(lm):
    number = len(lm.model.bind(lm.params).layers)
    texts, before = [LONG[: C * W + 5], "short", ""], lm.read(LONG[:7])
    for text, outputs in zip(texts, lm.forward_batch(texts, before, layers=range(number + 1)), strict=True):
        assert outputs.logits.shape == (len(text), BYTES.size)
        if not text:
            continue
        probabilities = np.asarray(jax.nn.log_softmax(outputs.logits))
        scored = probabilities[np.arange(len(text) - 1), outputs.tokens[1:]]
        np.testing.assert_allclose(scored, lm.score(text, before).log_probabilities[1:], atol=1e-5)
        module = lm.model.bind(lm.params)
        np.testing.assert_allclose(
            module.logits(module.finish(outputs.hidden[number], None)), outputs.logits, atol=1e-4
        )
        pieces = lm.forward(text[2:], lm.read(text[:2], before), layers=(0, -1))
        np.testing.assert_allclose(outputs.hidden[0][2:], pieces.hidden[0], atol=1e-5)
        np.testing.assert_allclose(outputs.hidden[number][2:], pieces.hidden[-1], atol=1e-5)


def test_states_are_compared_and_copied(states):
    first, second = states.read_batch([TEXT, TEXT + "x"])
    copied = first.copy()
    assert set(first.difference(copied).values()) == {0.0}
    assert copied.arrays["layers/0/recurrent_states/states"].shape == (4, 16)
    assert first.difference(second)["position"] == 1


def test_a_folder_is_all_that_is_needed(states, tmp_path):
    opened = states.opened
    write_checkpoint(tmp_path / "checkpoints", opened.params, opened.run, opened.vocabulary, 3)
    np.testing.assert_array_equal(
        meliad_like.load(tmp_path).score("some text").log_probabilities, states.score("some text").log_probabilities
    )
    with pytest.raises(UserError, match="belongs to another config: step is 7 there, 3 here"):
        states.read("a").save(tmp_path / "state")
        meliad_like.load(tmp_path).resume(tmp_path / "state")
    # Opened twice, a model is still the same.
    other = meliad_like.load(tmp_path)
    assert meliad_like.load(tmp_path).generate(other.read("a"), 3).tokens == other.generate("a", 3).tokens
    with pytest.raises(UserError, match="the state belongs to another config: step is 3 there, 7 here; let this model"):
        states.generate(other.read("a"))


@pytest.mark.thorough
def test_a_model_that_was_trained_on_another_platform(states, tmp_path):
    opened = states.opened
    with_kernel = read_changes((), ["DecoderConfig.attention_kernel = 'tpu'"])(opened.run)
    write_checkpoint(tmp_path, opened.params, with_kernel, opened.vocabulary)
    with pytest.raises(UserError, match="DecoderConfig.attention_kernel='tpu' needs a TPU"):
        meliad_like.load(tmp_path).score(TEXT)
    without = meliad_like.load(tmp_path, gin_params=["DecoderConfig.attention_kernel = 'none'"])
    np.testing.assert_array_equal(without.score(TEXT).log_probabilities, states.score(TEXT).log_probabilities)
    with pytest.raises(UserError, match="DecoderConfig.num_layers would need other parameters"):
        meliad_like.load(tmp_path, gin_params=["DecoderConfig.num_layers = 3"])


@pytest.mark.thorough
def test_the_lines_of_the_guide(states, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    opened = states.opened
    write_checkpoint("runs/quickstart/checkpoints", opened.params, opened.run, opened.vocabulary)
    Path("book.txt").write_text(TEXT)
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    [code] = [block for block in blocks if "meliad_like.load(" in block]
    exec(code, {})
    assert capsys.readouterr().out and Path("book.npz").exists()


def test_mistakes_are_named(states, tmp_path):
    with pytest.raises(UserError, match="has no usable checkpoint"):
        meliad_like.load(tmp_path)
    with pytest.raises(UserError, match="token 257 is not in the vocabulary, whose ids are 0 to 256"):
        states.score([1, 257])
    with pytest.raises(UserError, match="token -1 is not in the vocabulary, whose ids are 0 to 256"):
        states.read_batch([[1, 2], [3, -1]])
    for text, message in (
        (io.StringIO("a"), "and not StringIO"),
        (b"a", "and not bytes"),
        (["a"], "a text is a str, or its tokens as a sequence of whole numbers, and not list"),
        ([0.5], "and not list"),
        (None, "and not NoneType"),
        ([[1, 2]], "and not list"),
    ):
        with pytest.raises(UserError, match=message):
            states.read(text)
    with pytest.raises(UserError, match="no folder openai-community/gpt2: .* is hf://openai-community/gpt2, or hf:"):
        meliad_like.load("openai-community/gpt2")
    with pytest.raises(UserError, match="the prompt is empty"):
        states.generate("")
    with pytest.raises(UserError, match="prompt 1 of the batch is empty"):
        states.generate_batch(["a", ""])
    with pytest.raises(UserError, match="2 states for 3 texts: give one for each text, or one for all"):
        states.score_batch(["a", "b", "c"], [states.begin()] * 2)
    with pytest.raises(UserError, match="2 seeds for 3 texts: give one for each"):
        states.generate_batch(["a", "b", "c"], seeds=[1, 2])
    with pytest.raises(UserError, match="there is no layer 2; the layers are 1 to 1, and 0 the embedding"):
        states.forward("a", layers=[2])


def test_the_package_alone_imports_nothing_large():
    code = (
        "import sys, meliad_like; assert not {'jax', 'tensorflow', 'matplotlib'} & set(sys.modules); meliad_like.load"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.thorough
def test_our_models_are_opened_without_what_reads_those_of_other_programs(states, tmp_path):
    opened = states.opened
    write_checkpoint(tmp_path, opened.params, opened.run, opened.vocabulary)
    code = (
        "import sys, meliad_like.library as library; library.load(sys.argv[1]).read('a');"
        "loaded = {name for name in sys.modules if name.startswith(('safetensors', 'meliad_like.conversion'))};"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True)
