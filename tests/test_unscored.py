"""Parts of documents that are read and cost no loss: prompts of completions, and marked ranges."""

import json

import jax
import numpy as np
import pytest
from families import BYTES, CONFIGS, B, C, W, language_model

from meliad_like.data.preparation import prepare, prepare_part
from meliad_like.data.readers import LanesReader, LanesReaderConfig, StreamReader, StreamReaderConfig
from meliad_like.data.split import Documents
from meliad_like.data.token_store import UNSCORED_NAME, TokenStore
from meliad_like.errors import UserError
from meliad_like.evaluation.perplexity import Evaluator
from meliad_like.mesh import MeshConfig, make_mesh
from meliad_like.sources.base import EmptyDocumentError, RecordError, open_source
from meliad_like.sources.records import JsonLinesSource
from meliad_like.studies import protocols
from meliad_like.vocabularies.base import BytesVocabularyConfig
from meliad_like.vocabularies.sentencepiece import SentencePieceVocabularyConfig

SEGMENT = C * W
# Without a prompt; shorter than a block; longer than a segment, and a multiple of one; ends where a block does.
PROMPTS = ["", "ab", "é" * 40, "x" * 2 * SEGMENT, "question" * 3, "y" * (W - 1), "z" * (SEGMENT - 1)]
COMPLETIONS = ["only text", "c", "long " * 30, "d", " answer é\n", "w", "v" * SEGMENT]


def write(folder, records):
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "test.jsonl").write_text(text)
    (folder / "train.jsonl").write_text(text)
    return JsonLinesSource(folder=str(folder), unscored_field="prompt")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    pairs = zip(PROMPTS, COMPLETIONS, strict=True)
    records = [{"prompt": prompt, "text": completion} for prompt, completion in pairs]
    return write(tmp_path_factory.mktemp("documents"), records)


@pytest.fixture(scope="module")
def store(source, tmp_path_factory):
    return prepare(source, BytesVocabularyConfig(), tmp_path_factory.mktemp("store") / "store", 1)


@pytest.fixture(scope="module")
def expected_counts():
    """The number of targets of each document that cost loss: its completion and its end."""
    pairs = zip(PROMPTS, COMPLETIONS, strict=True)
    return [len(completion.encode()) + bool(prompt) for prompt, completion in pairs]


def test_the_losses_are_the_scores_of_completions_given_prompts(store, expected_counts):
    """With carry over segments, several documents in a lane, and several lanes."""
    lm, mesh = language_model(CONFIGS["fixed:skip"]), make_mesh(MeshConfig(), jax.devices()[:1])
    expected = []
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        tokens = np.append(BYTES.encode(completion), BYTES.end_of_document).astype(np.int32)
        score = lm.score(tokens, lm.read(prompt) if prompt else None)
        expected.append(-np.nansum(score.log_probabilities, dtype=np.float64))
    split = store.split("test")
    for num_lanes in 1, 3:
        options = {"name": "test", "segment_length": SEGMENT, "max_lanes": num_lanes}
        evaluation = Evaluator(lm.model, split, mesh, **options)(lm.params)
        np.testing.assert_allclose([document.nats for document in evaluation.documents], expected, rtol=1e-5)
        assert evaluation.nats == pytest.approx(sum(expected), rel=1e-5)
        assert [document.num_tokens for document in evaluation.documents] == expected_counts
        sizes = [len(completion.encode()) for completion in COMPLETIONS]
        assert [document.num_bytes for document in evaluation.documents] == sizes
        assert [document.num_words for document in evaluation.documents] == [len(c.split()) for c in COMPLETIONS]
    sliding = protocols.evaluate(lm.model, lm.params, split, "sliding", segment_length=SEGMENT, mesh=mesh, stride=4)
    assert sliding.num_tokens == sum(expected_counts)
    whole = protocols.evaluate(
        lm.model, lm.params, split.concatenated(256), "segments", segment_length=SEGMENT, mesh=mesh
    )
    # Of the stream, the first token of the document without a prompt is a target, too.
    assert whole.num_tokens == sum(expected_counts) + 1


def test_readers_count_the_same_targets(store, expected_counts):
    """Each target is compared with the text from which it comes: a range that is shifted would be seen."""
    documents = store.split("train")
    texts = [prompt.encode() + completion.encode() for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True)]
    for reader in (
        LanesReader(documents, 3, SEGMENT, W, shuffle=False, epochs=1),
        LanesReader(documents, 2, SEGMENT, W, epochs=1, overlap=1),
        LanesReader(Documents.joined([documents, documents]), B, SEGMENT, W, epochs=1),
        StreamReader(documents, 3, SEGMENT, W, epochs=1, end_of_document=256),
        StreamReader(documents, 3, SEGMENT, W, epochs=1, end_of_document=256, shuffle=True),
    ):
        is_stream, counted = isinstance(reader, StreamReader), []
        for step in range(reader.num_steps):
            batch = reader.batch(step, range(reader.num_lanes))
            counted += batch.targets[batch.loss_mask].tolist()
        copies = len(reader.documents) // len(documents)
        firsts = [int(not prompt and not is_stream) for prompt in PROMPTS]
        pieces = [c.encode()[first:] for c, first in zip(COMPLETIONS, firsts, strict=True)]
        expected = [byte for piece in pieces for byte in (*piece, 256)] * copies
        assert sorted(counted) == sorted(expected)
        assert len(counted) == copies * (sum(expected_counts) + is_stream)
    assert sum(len(text) + 1 for text in texts) == documents.lengths.sum()


def test_the_totals_and_the_bits_per_byte_of_training(store, expected_counts):
    totals = store.totals("train")
    assert totals.unscored == sum(len(prompt.encode()) for prompt in PROMPTS)
    assert totals.unscored_firsts == sum(map(bool, PROMPTS)) and totals.documents == len(PROMPTS)
    num_bytes = sum(len(completion.encode()) for completion in COMPLETIONS)
    assert totals.bytes == num_bytes
    assert LanesReaderConfig().bytes_per_target([totals]) == pytest.approx(num_bytes / sum(expected_counts))
    assert StreamReaderConfig().bytes_per_target([totals]) == pytest.approx(num_bytes / (sum(expected_counts) + 1))


def test_beginnings_count_the_bytes_that_cost_loss(store):
    beginnings = store.split("test").beginnings(store.vocabulary, max_tokens=7 * 20, shortest=20)
    assert beginnings.lengths.tolist() == [10, 4, 20, 20, 20, 5, 20]
    texts = [(prompt + completion).encode()[:20] for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True)]
    prompts = [len(prompt.encode()) for prompt in PROMPTS]
    assert beginnings.num_bytes.tolist() == [len(text[size:]) for text, size in zip(texts, prompts, strict=True)]


def test_ranges_of_a_text(tmp_path, capsys):
    record = {"text": "user: hi\nbot: hé!\nuser: bye\nbot: see you", "prompt": [[0, 14], [18, 33]]}
    source = write(tmp_path / "chat", [record, {"text": "all of it", "prompt": None}])
    split = prepare(source, BytesVocabularyConfig(), tmp_path / "store", 1).split("train")
    assert "58 of 104 tokens are read and cost no loss" in capsys.readouterr().err
    for document, expected in enumerate([b"h\xc3\xa9!\nsee you", b"all of it"]):
        tokens = split.tokens(document, 0, int(split.lengths[document]))
        counted = split.costs_loss(document, 0, tokens)
        assert bytes(tokens[counted][:-1].tolist()) == expected and counted[-1]
        assert split.num_bytes[document] == len(expected)
        for start in range(len(tokens)):
            part = np.s_[start : start + 7]
            np.testing.assert_array_equal(split.costs_loss(document, start, tokens[part]), counted[part])


def test_parts_are_tokenised_separately(source, tmp_path):
    """In the store as by `LanguageModel.score`: no token is on both sides of an edge."""
    vocabulary = SentencePieceVocabularyConfig(size=280)
    store = prepare(source, vocabulary, tmp_path / "store", 1)
    split = store.split("train")
    for i, (prompt, completion) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        encode, follow = store.vocabulary.encode, store.vocabulary.encode_continuation
        expected = [*encode(prompt), *follow(completion)] if prompt else [*encode(completion)]
        assert split.tokens(i, 0, int(split.lengths[i]) - 1).tolist() == expected
    for part in 1, 2, 3:
        prepare_part(source, vocabulary, tmp_path / "parts", part, 3, 1)
    prepare(source, vocabulary, tmp_path / "parts", 1)
    for name in store.info.splits:
        names = [path.name for path in (tmp_path / "store" / name).iterdir()]
        assert (UNSCORED_NAME in names) == (name != "validation")
        for file in names:
            assert (tmp_path / "store" / name / file).read_bytes() == (tmp_path / "parts" / name / file).read_bytes()
    (tmp_path / "parts" / "test" / UNSCORED_NAME).unlink()
    with pytest.raises(UserError, match="is damaged or missing: prepare the store again"):
        TokenStore(tmp_path / "parts").split("test")


@pytest.mark.parametrize(
    ("record", "error", "message"),
    [
        ({"text": "a", "prompt": 3}, RecordError, "the field 'prompt' is neither text nor pairs of whole numbers"),
        ({"text": "a", "prompt": [[0, "1"]]}, RecordError, "neither text nor pairs"),
        ({"text": "a", "prompt": [[0, 2]]}, RecordError, r"of 1 characters has the ranges \(\(0, 2\),\) without loss"),
        ({"text": "abcdef", "prompt": [[3, 4], [0, 1]]}, RecordError, "not pairs .* in order"),
        ({"text": "", "prompt": "only a prompt"}, EmptyDocumentError, "is empty"),
        ({"text": "abc", "prompt": [[0, 3]]}, EmptyDocumentError, "is empty"),
    ],
)
def test_bad_ranges(tmp_path, record, error, message):
    (reference, _) = open_source(write(tmp_path / "bad", [record])).references()
    with pytest.raises(error, match=message):
        reference()


def test_a_record_without_the_field(tmp_path):
    (reference, _) = open_source(write(tmp_path / "bad", [{"text": "a"}])).references()
    with pytest.raises(RecordError, match="has no field 'prompt'; it has 'text'"):
        reference()
