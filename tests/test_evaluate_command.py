"""Evaluating from a checkpoint folder, compressors, and reports."""

import dataclasses
import gzip
import json
import lzma
import math

import forked
import jax
import numpy as np
import pytest

from meliad_like import config
from meliad_like.config import read_changes
from meliad_like.data.preparation import prepare
from meliad_like.errors import UserError
from meliad_like.evaluation import report
from meliad_like.evaluation.report import compressed_bits_per_byte
from meliad_like.evaluation.scores import DocumentScore, Evaluation, PositionScore
from meliad_like.models.model import Model
from meliad_like.run.opening import checkpoint_metadata, open_checkpoint, open_store, save_vocabulary
from meliad_like.training.checkpoints import Checkpoints
from meliad_like.vocabularies.base import ByteVocabulary
from meliad_like.vocabularies.sentencepiece import SentencePieceVocabularyConfig

TEXTS = {"one.txt": "the quick brown fox\n" * 20, "two.txt": "jumps over\n", "three.txt": "é" * 100}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """Working folder of a run that saved step 3, and whose token store is missing."""
    root = tmp_path_factory.mktemp("evaluate")
    documents, workdir, store = root / "my documents", root / "workdir", root / "store"
    (documents / "test").mkdir(parents=True)
    for name, text in TEXTS.items():
        (documents / "test" / name).write_text(text)
    run = config.parse(
        ["size/tiny.gin"],
        [f"ReaderConfig.store = '{store}'", "RunConfig.source = 'text'", f"FolderSourceConfig.folder = '{documents}'"],
    )
    vocabulary = ByteVocabulary()
    save_vocabulary(vocabulary, workdir / "checkpoints")
    params = jax.jit(Model(run.model, vocabulary.size).init)(jax.random.key(7))
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        checkpoints.save(3, {"params": params, "step": np.int32(3)}, checkpoint_metadata(run, vocabulary, 3, None))
    return workdir


def evaluate(*arguments):
    return forked.run("-m", "meliad_like.evaluate", *map(str, arguments))


def test_a_checkpoint_folder_and_the_documents_are_enough(workdir, tmp_path):
    output = tmp_path / "new" / "evaluation.json"
    result = evaluate(f"--checkpoint={workdir}", "--prepare", "--compare", f"--output={output}")
    assert result.returncode == 0, result.stderr
    for words in ("bits per byte", "untrained", "xz -9", "3 bytes in all", "test: 3 documents, 611 bytes"):
        assert words in result.stdout

    saved = json.loads(output.read_text())
    assert saved["step"] == 3 and saved["bytes_of_first_tokens"] == 3
    texts = {name: text.encode() for name, text in TEXTS.items()}
    # Of a byte vocabulary: all bytes but the first, and the end of the document.
    assert {document["name"]: document["num_tokens"] for document in saved["documents"]} == {
        name.removesuffix(".txt"): len(text) for name, text in texts.items()
    }
    assert saved["figures"]["num_words"] == 80 + 2 + 1
    assert saved["figures"]["bits_per_byte"] == pytest.approx(saved["nats"] / math.log(2) / 611)
    brief = evaluate(f"--checkpoint={workdir}", "--nodetails")
    assert "step 3" in brief.stdout and "bits per byte" in brief.stdout and "by position" not in brief.stdout
    assert saved["other_bits_per_byte"]["gzip -9"] == 8 * sum(len(gzip.compress(text)) for text in texts.values()) / 611


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output=/dev/null/a.json"], "cannot write --output=/dev/null/a.json: /dev/null is not a folder"),
        (["--store="], "--store= is empty: is the variable set that it should hold?"),
    ],
)
def test_paths_are_checked_before_the_work(arguments, message):
    result = evaluate("--checkpoint=none", *arguments)
    assert (result.returncode, message in result.stderr) == (2, True)


def test_the_missing_store_is_one_line_with_the_way_out(workdir, tmp_path):
    result = evaluate(f"--checkpoint={workdir / 'checkpoints'}", f"--store={tmp_path / 'none'}")
    assert result.returncode == 2
    assert f"error: there is no token store at {tmp_path / 'none'}: give --store=DIR, or add --prepare" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_store_of_another_vocabulary_is_refused(workdir, tmp_path):
    opened = open_checkpoint(workdir)
    other = dataclasses.replace(opened.run.vocabulary, size_multiple=64)
    prepare(opened.run.source, other, tmp_path / "other", 1)
    with pytest.raises(
        UserError, match=r"the vocabulary of the checkpoint .*workdir \(\w{12}\) is not that of .*other"
    ):
        open_store(opened, workdir, str(tmp_path / "other"), prepare=False)


@pytest.mark.thorough
def test_the_store_is_made_with_the_vocabulary_of_the_checkpoint(workdir, tmp_path):
    opened = open_checkpoint(workdir)
    settings = SentencePieceVocabularyConfig(size=280)
    vocabulary = settings.make(["a vocabulary learned from documents that are gone"])
    save_vocabulary(vocabulary, tmp_path / "checkpoints")
    run = dataclasses.replace(opened.run, vocabulary=settings)
    store = open_store(opened._replace(run=run, vocabulary=vocabulary), tmp_path, str(tmp_path / "store"), prepare=True)
    assert store.vocabulary.fingerprint == vocabulary.fingerprint


@pytest.mark.thorough
def test_a_store_of_texts_that_were_edited_is_not_evaluated_in_silence(workdir, tmp_path):
    opened = open_checkpoint(workdir)
    (tmp_path / "texts" / "test").mkdir(parents=True)
    text = tmp_path / "texts" / "test" / "a.txt"
    source = dataclasses.replace(opened.run.source, folder=str(tmp_path / "texts"))
    opened, store = opened._replace(run=dataclasses.replace(opened.run, source=source)), str(tmp_path / "store")
    text.write_text("one text")
    for _ in range(2):
        open_store(opened, workdir, store, prepare=True)
    text.write_text("another text")
    with pytest.raises(UserError, match="the documents in .*texts, which have changed since"):
        open_store(opened, workdir, store, prepare=True)


def test_parameters_change_the_config_but_not_the_shapes(workdir):
    def opened(*bindings):
        return open_checkpoint(workdir, changes=read_changes((), bindings), mesh="config")

    sharded = opened("ReaderConfig.segment_length = 32", "MeshConfig.fsdp = 2")
    assert (sharded.run.data.segment_length, sharded.mesh.shape["fsdp"], sharded.step) == (32, 2, 3)
    assert not opened("DecoderConfig.mask_empty_cache = False").model.config.mask_empty_cache
    with pytest.raises(UserError, match=r"DecoderConfig.num_layers would need other parameters than those of"):
        opened("DecoderConfig.num_layers = 4")
    with pytest.raises(UserError, match="nothing reads"):
        opened("RECURRENT_LAYERS = (1,)")


class TextSplit:
    """Byte tokens of two texts."""

    texts = ("a rose is a rose " * 30).encode(), b"x"
    lengths = np.array([len(text) + 1 for text in texts])
    num_bytes = lengths - 1
    num_words = np.array([240, 1])
    names = ("rose", "x")

    def tokens(self, document, start, stop):
        return np.array([*self.texts[document], 256])[start:stop]


def test_compressors_see_each_document_alone_and_only_those_asked_for():
    split, vocabulary = TextSplit(), ByteVocabulary()
    sizes = [len(lzma.compress(text, preset=9)) for text in split.texts]
    both = compressed_bits_per_byte(split, [0, 1], vocabulary)
    assert both["xz -9"] == 8 * sum(sizes) / split.num_bytes.sum()
    assert compressed_bits_per_byte(split, [0], vocabulary)["xz -9"] == 8 * sizes[0] / split.num_bytes[0]


def make_evaluation(bits=300, words=50):
    nats = bits * math.log(2)
    documents = (
        DocumentScore(num_tokens=100, nats=nats, num_correct=30, name="a", num_bytes=150, num_words=words),
        DocumentScore(num_tokens=0, nats=0.0, num_correct=0, name="empty", num_bytes=0, num_words=0),
    )
    positions = (PositionScore(num_tokens=100, nats=nats, num_correct=30, start=0, stop=128),)
    return Evaluation.of(documents, split="test", positions=positions, documents_in_split=9, seconds=4.0)


def test_figures():
    evaluation = make_evaluation()
    figures = {name: getattr(evaluation, name) for name in report.FIGURES}
    assert figures == pytest.approx(
        {
            "bits_per_token": 3.0,
            "perplexity": 8.0,
            "bits_per_byte": 2.0,
            "word_perplexity": 64.0,
            "accuracy": 0.3,
            "num_documents": 2,
            "num_tokens": 100,
            "num_bytes": 150,
            "num_words": 50,
            "tokens_per_word": 2.0,
            "tokens_per_second": 25.0,
        }
    )


def test_a_file_holds_the_figures_and_every_document(tmp_path):
    evaluation = make_evaluation(words=0)
    report.write(evaluation, tmp_path / "e.json", step=5)
    saved = json.loads((tmp_path / "e.json").read_text())
    assert saved["step"] == 5 and saved["figures"]["word_perplexity"] is None
    assert tuple(DocumentScore(**document) for document in saved["documents"]) == evaluation.documents
    assert tuple(PositionScore(**score) for score in saved["positions"]) == evaluation.positions


def test_what_leaks_the_future_says_so(tmp_path):
    honest = make_evaluation()
    oracle = dataclasses.replace(honest, leaks_the_future=True)
    report.write(oracle, tmp_path / "e.json")
    assert json.loads((tmp_path / "e.json").read_text())["leaks_the_future"]
    assert report.title(oracle).startswith("test (leaks the future): ") and report.title(honest).startswith("test: ")
    assert report.table(oracle).header == ("", "test (leaks the future)")
    rows = report.comparison({"honest": honest, "oracle": oracle}).rows
    assert [row[0] for row in rows] == ["honest", "oracle (leaks the future)"]


def test_the_comparison():
    before, after = make_evaluation(1200), make_evaluation(words=2)
    table = report.comparison({"before": before, "after": after}, {"gzip -9": 2.5})
    assert table.to_markdown() == (
        "test: a subset, 2 of 9 documents, 150 bytes\n"
        "\n"
        "|  | bits per byte | bits per token | word perplexity | accuracy |\n"
        "| --- | ---: | ---: | ---: | ---: |\n"
        "| before | 8.0000 | 12.0000 | 16,777,216 | 0.3000 |\n"
        "| after | 2.0000 | 3.0000 | 1.43e+45 | 0.3000 |\n"
        "| gzip -9 | 2.5000 |  |  |  |\n"
    )
    other = dataclasses.replace(after, documents=after.documents[:1])
    with pytest.raises(UserError, match=r"after \(.*\) and before \(.*\) are not of the same documents"):
        report.comparison({"before": before, "after": other})
