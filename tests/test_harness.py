"""The lm-evaluation-harness: its numbers are those of the library and of the evaluator, and of its own adapter."""

import importlib.util
import json
import os
import random
import re
import runpy
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import forked
import jax
import numpy as np
import pytest
from families import BYTES, CONFIGS, FAMILIES, C, W, language_model
from harness_items import Item, items, write_tasks
from make_golden_harness import PATH as GOLDEN
from make_golden_harness import SMALL, answers, theirs, write_folder

from meliad_like.conversion.parameters import write_checkpoint
from meliad_like.data.split import Documents
from meliad_like.errors import UserError
from meliad_like.evaluation.perplexity import Evaluator
from meliad_like.harness.__main__ import import_harness
from meliad_like.harness.needles import draw_heat_map, needle_maps
from meliad_like.library import LanguageModel
from meliad_like.mesh import MeshConfig, make_mesh
from meliad_like.vocabularies.sentencepiece import SentencePieceVocabularyConfig

# Nothing is downloaded, and no copy of a task's documents stays.
HOME = tempfile.TemporaryDirectory()
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": HOME.name}
IS_INSTALLED = importlib.util.find_spec("lm_eval") is not None
needs_harness = pytest.mark.skipif(not IS_INSTALLED, reason="pip install lm_eval")
# Without the harness, its base class has the one member that the scores of texts need.
BASE = type("TemplateLM", (), {"cache_hook": mock.Mock()})
NAMES = ("lm_eval", "lm_eval.api", "lm_eval.api.instance", "lm_eval.api.registry", "lm_eval.models.utils")
STUBS = dict.fromkeys(NAMES, mock.Mock(register_model=lambda name: lambda model: model))
STUBS["lm_eval.api.model"] = mock.Mock(TemplateLM=BASE)
# Afterwards the dictionary would lack an installed harness that is imported here.
with nullcontext() if IS_INSTALLED else mock.patch.dict(sys.modules, STUBS):
    from meliad_like.harness.model import HarnessModel, tokenizer_for_tasks

BOOK = "It was read once, and remembered for all of the questions. "
OTHER = "It was read on every day, by those who remember nothing. "
QUESTIONS = [
    *((BOOK + "What was read?", answer) for answer in (" A book", " A bill", " It")),
    *((BOOK + "How often?", answer) for answer in (" 1", " Twice or more, and each time from its first page")),
    (BOOK[:9], BOOK[9:]),
    *((OTHER + "How often?", answer) for answer in (" Once", " Each day")),
    # Longer than a window, and not after a state.
    ("None read it", " yet"),
    # As long as what follows the states above, but without a state.
    ("?", " 7"),
]


@pytest.fixture(scope="module", params=FAMILIES)
def lm(request) -> LanguageModel:
    return language_model(FAMILIES[request.param])


@pytest.fixture(scope="module")
def states() -> LanguageModel:
    return language_model(FAMILIES["lstm:dual"])


def test_needles_by_length_and_depth(tmp_path, capsys):
    """The first answer's place in the document says the depth, and the document's own length which score counts."""

    def sample(num_before, length, score):
        text = num_before * "a" + "One of the special magic numbers for x is: 7." + (955 - num_before) * "7"
        return {"doc": {"input": text, "outputs": ["7"], "max_length": length}, "4096": -1.0, str(length): score}

    samples = [sample(0, 1024, 1.0), sample(49, 1024, 0.0), sample(955, 1024, 1.0), sample(955, 4096, 0.25)]
    maps = needle_maps({"niah": samples, "other": [{"doc": {"input": "a"}}]})
    assert list(maps) == ["niah"]
    assert maps["niah"].index.tolist() == ["0 to 10 %", "90 to 100 %"]
    np.testing.assert_array_equal(maps["niah"], [[0.5, np.nan], [1.0, 0.25]])
    assert maps["niah"].columns.tolist() == ["1,024 tokens", "4,096 tokens"]
    draw_heat_map(maps, tmp_path / "map.png")
    assert "90 to 100 %" in capsys.readouterr().out
    assert (tmp_path / "map.png").stat().st_size > 0
    with pytest.raises(UserError, match="none of the tasks has needles"):
        draw_heat_map({}, tmp_path / "map.png")


@pytest.mark.parametrize(("text", "answer"), [
    # HotpotQA as RULER asks it: a "no" is in every text, and a "yes" in none.
    ("The following are given documents.\n\nDocument 1:\nNothing is known.\n\nAre both from the UK?", "no"),
    ("The following are given documents.\n\nDocument 1:\nBoth are British.\n\nAre both from the UK?", "yes"),
    # Its most frequent words, and the values of variables.
    ("The words: wolf fox wolf. What are the 2 most common words?", "wolf"),
    ("VAR ABC = 12345 VAR DEF = VAR ABC. Find all variables that are assigned the value 12345.", "ABC"),
])  # fmt: skip
def test_tasks_without_needles_have_no_map(text, answer):
    document = {"input": text, "outputs": [answer], "max_length": 4096}
    assert needle_maps({"qa": [{"doc": document, "4096": 1.0}]}) == {}


def requests(kind, arguments):
    return [SimpleNamespace(request_type=kind, args=given) for given in arguments]


def evaluate(model, files):
    import lm_eval
    from lm_eval.tasks import TaskManager

    tasks = TaskManager(include_defaults=False)
    return lm_eval.simple_evaluate(model=model, tasks=list(map(str, files)), task_manager=tasks, bootstrap_iters=0)


def plain(lm, context, continuation):
    """The log-probability of a continuation, from the library's score of the whole text, and whether it is greedy."""
    score, scored = lm.score(context + continuation), np.s_[len(context) :]
    return float(score.log_probabilities[scored].sum(dtype=np.float64)), bool(score.most_likely[scored].all())


def test_a_shared_prefix_changes_nothing(lm):
    found = HarnessModel(lm, batch_size=3).loglikelihood(requests("loglikelihood", QUESTIONS))
    expected = [plain(lm, *question) for question in QUESTIONS]
    np.testing.assert_allclose(*([nats for nats, _ in results] for results in (found, expected)), atol=1e-4)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]


def test_a_prefix_is_read_once(states, monkeypatch):
    num_read, read = [], states.read_batch
    monkeypatch.setattr(
        states, "read_batch", lambda texts, state: num_read.extend(map(len, texts)) or read(texts, state)
    )
    HarnessModel(states).loglikelihood(requests("loglikelihood", QUESTIONS))
    # What all begin with, each book, and its questions.
    assert len(num_read) <= 7 and sum(num_read) < 1.5 * len(BOOK + OTHER)


def test_the_most_likely_continuation_is_found(states):
    written = states.generate(BOOK, 5, temperature=0).tokens
    model = HarnessModel(states)
    found = model._loglikelihood_tokens(
        [(("", ""), list(BOOK.encode()), tokens) for tokens in (written, [1, *written])]
    )
    assert [greedy for _, greedy in found] == [True, False]
    with pytest.raises(UserError, match="token 400 is not in the vocabulary, whose ids are 0 to 256"):
        model._loglikelihood_tokens([(("", ""), [1], [2]), (("", ""), [1], [400])])


@pytest.mark.parametrize("num_tokens", [1, W + 1])
def test_an_empty_context_is_the_first_token(lm, num_tokens):
    model, tokens = HarnessModel(lm, first_tokens=True), list(BOOK.encode()[:num_tokens])
    found = model._loglikelihood_tokens([(("", ""), context, tokens) for context in ([], [model.prefix_token_id])])
    assert found[0] == found[1] and found[0][0] < 0


def test_rolling_likelihood_is_that_of_the_evaluation(lm):
    texts = [item.context for item in items(3)] + ["", "a"]
    found = HarnessModel(lm, batch_size=2).loglikelihood_rolling(
        requests("loglikelihood_rolling", [(t,) for t in texts])
    )
    tokens = [BYTES.encode(text) for text in texts]
    lengths = np.array([len(x) for x in tokens])
    documents = Documents(texts, lengths, lengths, lengths, lambda i, a, b: tokens[i][a:b], np.arange(len(texts)))
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    evaluator = Evaluator(lm.model, documents, mesh, name="test", segment_length=C * W, max_lanes=1)
    expected = evaluator(lm.params)
    for result, document in zip(found, expected.documents, strict=True):
        assert -result == pytest.approx(document.nats, abs=1e-6 * max(document.num_tokens, 1))


FOREIGN = """
Съешь же ещё этих мягких французских булок, да выпей чаю. Zażółć gęślą jaźń; où l'obèse jury mûr fête l'haï volapük.
色は匂へど散りぬるを 我が世誰ぞ常ならむ
"""
JOINS = {
    "space": r"(?<=\w)(?= \w)",
    "newline": r"(?<=\n)(?=.|\n)",
    "inside of a word": r"(?<=[a-z])(?=[a-z]{2})",
    "non-ASCII": r"(?<=[^\x00-\x7f])(?=[^\x00-\x7f])",
    "empty context": r"",
}


def joins(text: str) -> Iterator[tuple[str, str, list[str]]]:
    """25 items for each kind of join: the kind, a context, and choices that follow places of this kind."""
    chance = random.Random(0)
    for kind, pattern in JOINS.items():
        places = [match.start() for match in re.finditer(pattern, text)]
        endings = sorted({text[place : place + 6] for place in places})
        for place in chance.sample(places, 25):
            context = "" if kind == "empty context" else text[max(0, place - 30) : place]
            yield kind, context, list({text[place : place + 6]: 0} | dict.fromkeys(chance.sample(endings, 4)))[:4]


def test_any_join_is_that_of_both_texts():
    """The tokens of a context are often not those of the text that continues it, such as `impor` and `t`."""
    text = Path(__file__).read_text()
    vocabulary = SentencePieceVocabularyConfig(model_type="bpe", size=1000).make([text, FOREIGN * 10])
    lm, encode, end = language_model(CONFIGS["slide"], vocabulary), vocabulary.encode, vocabulary.end_of_document
    asked = [(kind, context, choice) for kind, context, choices in joins(text) for choice in choices]
    # A text has no probability without a token before it.
    texts = [part if context else [end, *encode(part)] for _, context, x in asked for part in (context + x, context)]
    wholes, contexts = np.reshape([score.log_probability for score in lm.score_batch(texts)], (125, 4, 2)).T
    model = HarnessModel(lm, batch_size=100, first_tokens=True)
    results = model.loglikelihood(requests("loglikelihood", [pair for _, *pair in asked]))
    nats = np.reshape([nats for nats, _ in results], (125, 4))
    np.testing.assert_allclose(nats, (wholes - contexts).T, atol=1e-5)
    np.testing.assert_array_equal(nats.argmax(axis=1), (wholes - contexts).argmax(axis=0))
    merged = Counter(kind for kind, c, rest in asked if [*encode(c + rest)[: len(encode(c))]] != [*encode(c)])
    assert min(merged[kind] for kind in ("newline", "inside of a word", "non-ASCII")) > 10
    with pytest.raises(UserError, match="only a part of its text's first token, .* choose --first_tokens"):
        HarnessModel(lm).loglikelihood(requests("loglikelihood", [("d", "ef")]))


@needs_harness
def test_accuracy_is_that_of_a_plain_loop(states, tmp_path):
    questions = items(200)
    results = evaluate(HarnessModel(states, batch_size=64), [write_tasks(tmp_path, 200)["library_choices"]])
    right = [
        int(np.argmax([plain(states, item.context, choice)[0] for choice in item.choices])) == item.answer
        for item in questions
    ]
    assert results["results"]["library_choices"]["acc,none"] == np.mean(right)


@needs_harness
def test_text_is_written_up_to_what_ends_it(states):
    model, start = HarnessModel(states), "once"
    whole = states.generate(start, 40, temperature=0).text
    stop = whole[5:7]
    [greedy] = model.generate_until(requests("generate_until", [(start, {"until": [stop], "max_gen_toks": 40})]))
    assert greedy == whole[: whole.index(stop)]
    sampled = {"until": [], "max_gen_toks": 9, "do_sample": True, "temperature": 2.0, "top_k": 40}
    found = model.generate_until(requests("generate_until", [(start, sampled)] * 2))
    assert found[0] == states.generate(start, 9, seed=0, temperature=2.0, top_k=40).text != found[1]
    with pytest.raises(UserError, match="generation_kwargs.num_beams is not one of do_sample, temperature, top_k"):
        model.generate_until(requests("generate_until", [(start, {"until": [], "num_beams": 2})]))


def test_memories_that_depend_on_segments_are_refused():
    with pytest.raises(UserError, match="DecoderConfig.clear_states=True.*use python -m meliad_like.evaluate"):
        HarnessModel(language_model(CONFIGS["slide below skip"]))


def test_the_first_token_of_a_document(states):
    with pytest.raises(UserError, match="empty context, .* choose --first_tokens"):
        HarnessModel(states).loglikelihood(requests("loglikelihood", [("", "a")]))
    model = HarnessModel(states, first_tokens=True)
    [(nats, _)] = model.loglikelihood(requests("loglikelihood", [("", "ab")]))
    expected = states.score([BYTES.end_of_document, *b"ab"]).log_probabilities[1:].sum()
    assert nats == pytest.approx(expected, abs=1e-5)
    assert model.loglikelihood_rolling(requests("loglikelihood_rolling", [("ab",)])) == pytest.approx([nats], abs=1e-5)


@needs_harness
def test_the_command(states, tmp_path):
    opened = states.opened
    write_checkpoint(tmp_path / "run" / "checkpoints", opened.params, opened.run, opened.vocabulary, 3)
    files = write_tasks(tmp_path, 8)
    flags = [f"--checkpoint={tmp_path / 'run'}", f"--output={tmp_path / 'results.json'}", "--log_samples", "--limit=5"]
    done = forked.run("-m", "meliad_like.harness", *flags, f"--tasks={','.join(map(str, files.values()))}")
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["config"]["checkpoint_step"] == 3 and results["n-samples"]["library_choices"]["effective"] == 5
    found = [sample["resps"] for sample in results["samples"]["library_choices"]]
    assert [float(x[0][0]) for x in found[0]] == pytest.approx(
        [plain(states, items(8)[0].context, choice)[0] for choice in items(8)[0].choices], abs=1e-4
    )
    assert results["results"]["library_rolling"]["bits_per_byte,none"] > 0
    assert "library_writing" in done.stdout


@needs_harness
def test_mistakes_are_named(tmp_path):
    def refused(message, *flags):
        done = forked.run("-m", "meliad_like.harness", f"--checkpoint={tmp_path}", *flags)
        assert done.returncode == 2 and message in done.stderr, done.stderr

    refused("error: there is no task file none.yaml", "--tasks=none.yaml")
    refused("error: --log_samples has no effect without --output", "--tasks=none.yaml", "--log_samples")


@pytest.mark.parametrize("value", ["[4096]", "4096", "{max_seq_lengths: 4096}"])
def test_metadata_must_be_an_object(value):
    done = forked.run("-m", "meliad_like.harness", "--checkpoint=a", "--tasks=b", f"--metadata={value}")
    assert done.returncode == 2 and f"error: --metadata={value} is not " in done.stderr


def test_a_missing_harness_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(UserError, match=r"install the harness with pip install 'meliad_like\[harness\]'"):
        import_harness()
    with pytest.raises(SystemExit, match=r"^error: .*install the harness with pip install 'meliad_like\[harness\]'$"):
        runpy.run_path(f"{forked.ROOT}/benchmarks/needle_documents.py")


@pytest.fixture(scope="module")
def golden():
    return json.loads(GOLDEN.read_text())


@needs_harness
def test_the_harness_own_adapter_says_the_same(golden, tmp_path):
    """For a random Llama with the heads of SmolLM2-135M, which our export has written for transformers."""
    questions = [Item(*item) for item in golden["items"]]
    found = answers(HarnessModel(write_folder(SMALL, tmp_path), first_tokens=True), questions)
    np.testing.assert_allclose(found["nats"], golden["nats"], atol=1e-3)
    np.testing.assert_allclose(found["rolling"], golden["rolling"], atol=1e-3)
    assert (found["greedy"], found["written"]) == (golden["greedy"], golden["written"])


@needs_harness
def test_the_arrays_are_those_of_the_harness(golden, tmp_path):
    """Where transformers is installed."""
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    found = theirs(write_folder(SMALL, tmp_path), [Item(*item) for item in golden["items"]])
    np.testing.assert_allclose(found["nats"], golden["nats"], atol=1e-4)


def test_tasks_count_tokens_in_the_models_vocabulary(monkeypatch):
    asked = []
    auto = SimpleNamespace(from_pretrained=asked.append)
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(AutoTokenizer=auto))
    with tokenizer_for_tasks(SimpleNamespace(tok_encode=list), "runs/a"):
        assert auto.from_pretrained("runs/a")("text").input_ids == list("text")
        auto.from_pretrained("gpt2")
    auto.from_pretrained("runs/a")
    assert asked == ["gpt2", "runs/a"]
