"""A pretrained model from its folder through fine-tuning with a recurrence, evaluation and text, and back."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from pretrained_models import Pretrained, read_published, write_byte_tokenizer, write_windows
from tiny_run import read_metrics, train

from meliad_like import config
from meliad_like.config import from_json, read_changes
from meliad_like.conversion.pretrained import convert_from_huggingface, convert_to_huggingface
from meliad_like.data.preparation import prepare
from meliad_like.data.readers import READERS
from meliad_like.data.token_store import TokenStore
from meliad_like.errors import UserError
from meliad_like.evaluation.perplexity import Evaluator
from meliad_like.families.pretrained.config import PretrainedConfig
from meliad_like.generation.streaming import Generator, SamplingConfig
from meliad_like.library import load
from meliad_like.models.model import Model
from meliad_like.run.opening import config_for_training, open_checkpoint, saved_config
from meliad_like.training.checkpoints import Checkpoints
from meliad_like.vocabularies.tokenizers import read_tokenizer

DECODER = PretrainedConfig(
    num_layers=2,
    model_width=16,
    num_heads=2,
    num_key_value_heads=2,
    head_size=8,
    feedforward_width=16,
    max_positions=12,
    window_length=12,
)
BINDINGS = [
    "RunConfig.model = 'pretrained'",
    "PretrainedConfig.num_layers = 2",
    "PretrainedConfig.model_width = 16",
    "PretrainedConfig.num_heads = 2",
    "PretrainedConfig.num_key_value_heads = 2",
    "PretrainedConfig.head_size = 8",
    "PretrainedConfig.feedforward_width = 16",
    "PretrainedConfig.max_positions = 12",
    "PretrainedConfig.window_length = 8",
    "PretrainedConfig.overlap = 2",
    "RunConfig.data = 'windows'",
    "ReaderConfig.segment_length = 32",
    "ReaderConfig.tokens_per_step = 128",
    "RunConfig.optimizer = 'adam'",
    "OptimizerConfig.base_rate = 1.0",
    "RunConfig.schedule = 'constant'",
    "ConstantSchedule.rate = 0.01",
    "ScheduleConfig.warmup_steps = 2",
    "TrainingConfig.num_steps = 8",
    "TrainingConfig.log_every = 1",
    "TrainingConfig.evaluate_every = 4",
    "TrainingConfig.keep_best = True",
]
RECURRENT = [
    "PretrainedConfig.recurrence = ('window_summary',)",
    "WindowSummary.layers = (1,)",
    "WindowSummary.width = 6",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A random model in a folder of transformers, our checkpoint of it, and documents."""
    folder = tmp_path_factory.mktemp("pretrained")
    (folder / "theirs").mkdir()
    pretrained = Pretrained(DECODER, 257, Model(DECODER, 257).init(jax.random.key(0)))
    write_windows(pretrained, 256, folder / "theirs")
    write_byte_tokenizer(folder / "theirs")
    generator = np.random.default_rng(0)
    for split, num_documents in (("train", 8), ("validation", 2), ("test", 1)):
        (folder / "documents" / split).mkdir(parents=True)
        for i in range(num_documents):
            words = generator.choice(["a", "rose", "is"], size=generator.integers(5, 60))
            (folder / "documents" / split / f"{i}.txt").write_text(" ".join(words))
    convert_from_huggingface(folder / "theirs", [], documents(folder), folder / "ours")
    run = config.parse([], [*documents(folder), *BINDINGS])
    prepare(run.source, run.vocabulary, run.data.store, num_workers=1)
    return folder


def documents(folder):
    return [
        "RunConfig.source = 'text'",
        f"FolderSourceConfig.folder = '{folder / 'documents'}'",
        f"ReaderConfig.store = '{folder / 'store'}'",
        "RunConfig.vocabulary = 'tokenizers'",
        f"FileVocabularyConfig.model_file = '{folder / 'theirs'}'",
    ]


def run_of(place, *more):
    return config.parse([], [*documents(place), *BINDINGS, *more])


@pytest.fixture(scope="module")
def trained(place):
    train(run_of(place, *RECURRENT, "MeshConfig.data = 1"), place / "trained", place / "ours")
    return place / "trained"


def evaluate(folder, *bindings):
    changes = read_changes((), ["MeshConfig.data = 8", *bindings])
    opened = open_checkpoint(folder, changes=changes, mesh="config")
    store = TokenStore(opened.run.data.store)
    evaluator = Evaluator(
        opened.model, store.split("test"), opened.mesh, name="test",
        segment_length=2 * opened.model.config.window_length, max_lanes=1,
    )  # fmt: skip
    return evaluator(opened.params)


def test_a_converted_model_is_the_same_model(place):
    opened = open_checkpoint(place / "ours")
    theirs = read_published(place / "theirs")
    assert opened.run.model == DECODER
    jax.tree.map(np.testing.assert_array_equal, opened.params, theirs.params)
    assert opened.vocabulary.decode(opened.vocabulary.encode("a rose")) == "a rose"
    ours, same = (load(place / name).score("a rose is a rose").log_probabilities for name in ("ours", "theirs"))
    np.testing.assert_array_equal(ours, same)


def test_it_learns_and_the_recurrence_begins_fresh(place, trained):
    losses = [metrics["loss"] for metrics in read_metrics(trained)]
    assert losses[-1] < losses[0] - 0.5
    before, after = open_checkpoint(place / "ours"), open_checkpoint(trained)
    assert (np.asarray(after.params["embedding"]) != before.params["embedding"]).any()
    assert "recurrence" not in before.params
    assert np.abs(after.params["recurrence"]["layers"][0]["bias"]).max() > 0


def test_the_best_parameters_are_kept(trained):
    by_step = {metrics["step"]: metrics["bits_per_token"] for metrics in read_metrics(trained, "validation")}
    best = open_checkpoint(trained / "best")
    assert set(by_step) == {4, 8}
    assert best.step == min(by_step, key=by_step.__getitem__)
    # Worse ones do not take their place.
    with Checkpoints(trained / "best", keep_last=1) as checkpoints:
        worse = checkpoints.read_metadata() | {"step": 9, "bits_per_token": -1.0}
        checkpoints.save(9, {"step": np.int32(9), "params": best.params}, worse)
    run = from_json(json.dumps(worse["config"]))
    longer = dataclasses.replace(run, training=dataclasses.replace(run.training, num_steps=10))
    train(longer, trained)
    assert open_checkpoint(trained / "best").step == 9


@pytest.mark.thorough
def test_a_fixed_decoder_stays_as_it_is(place):
    fixed = ["PretrainedConfig.train_decoder = False", "TrainingConfig.num_steps = 3", "MeshConfig.data = 1"]
    train(run_of(place, *RECURRENT, *fixed), place / "fixed", place / "ours")
    before, after = open_checkpoint(place / "ours").params, open_checkpoint(place / "fixed").params
    assert np.abs(after.pop("recurrence")["layers"][0]["bias"]).max() > 0
    jax.tree.map(np.testing.assert_array_equal, after, before)


def test_other_windows_and_overlaps_are_evaluated_with_the_same_parameters(place, trained):
    length = sum(1 for _ in open_checkpoint(trained).vocabulary.encode((place / "documents/test/0.txt").read_text()))
    scores = {overlap: evaluate(place / "ours", f"PretrainedConfig.overlap = {overlap}") for overlap in (0, 11)}
    for score in scores.values():
        assert score.num_tokens == length
    recurrent = evaluate(trained)
    assert recurrent.num_tokens == length
    assert recurrent.bits_per_token < scores[0].bits_per_token


@pytest.mark.parametrize("folder, window", [pytest.param("ours", 12, marks=pytest.mark.exhaustive), ("trained", 8)])
@pytest.mark.thorough
def test_text_of_any_length(place, trained, folder, window):
    opened = open_checkpoint(place / folder, changes=read_changes((), ["MeshConfig.data = 8"]), mesh="config")
    generator = Generator(
        opened.model, opened.params, segment_length=2 * window, vocabulary=opened.vocabulary,
        sampling=SamplingConfig(temperature=0.0), stop_at_end=False,
    )  # fmt: skip
    prompt = opened.vocabulary.encode("a rose is a rose is a rose is")
    written = generator.continuation(prompt, 20)
    assert len(written) == 20
    # Whatever is read at once, the text is the same.
    slowly = generator.begin(0)
    for token in prompt:
        slowly = generator.read(slowly, [np.array([token])])
    assert written == [token for [tokens], _ in generator.write(slowly, 20) for token in tokens]


def test_back_to_transformers(place, trained, tmp_path):
    convert_to_huggingface(trained, tmp_path / "back")
    names = {path.name for path in (tmp_path / "back").iterdir()}
    assert names >= {"config.json", "model.safetensors", "recurrence.safetensors", "tokenizer.json"}
    ours = open_checkpoint(trained)
    convert_from_huggingface(tmp_path / "back", [], [], tmp_path / "again")
    again = open_checkpoint(tmp_path / "again")
    # The recurrence, with the windows that it was trained between, comes back as well.
    assert again.run.model == ours.run.model and ours.run.model.overlap == 2
    assert READERS.name_of(again.run.data) == "windows"
    jax.tree.map(np.testing.assert_array_equal, again.params, ours.params)
    with pytest.raises(UserError, match="width = 7, but .*back has 6"):
        changed = ["WindowSummary.width = 7"]
        convert_from_huggingface(tmp_path / "back", [], changed, tmp_path / "other")
    # Lists and tuples say the same.
    same = ["WindowSummary.layers = [1]"]
    convert_from_huggingface(tmp_path / "back", [], same, tmp_path / "the_same")
    assert open_checkpoint(tmp_path / "the_same").run.model == ours.run.model
    with pytest.raises(UserError, match="back is not empty: choose another --output"):
        convert_to_huggingface(trained, tmp_path / "back")
    with pytest.raises(UserError, match="config.json is a file: choose another --output"):
        convert_to_huggingface(trained, tmp_path / "back" / "config.json")


def test_the_config_of_a_converted_model_is_beside_it(place):
    """Model and vocabulary, which is that of the checkpoint."""
    run, saved = config.parse([str(place / "ours" / "config.gin")]), saved_config(place / "ours")
    assert (run.model, run.vocabulary) == (saved.model, saved.vocabulary)
    assert run.vocabulary.model_file == str(place / "ours" / "vocabulary")
    assert run.vocabulary.make().fingerprint == open_checkpoint(place / "ours").vocabulary.fingerprint
    assert run.data.segment_length == saved.data.segment_length
    assert config_for_training(place / "ours", read_changes()) == run
    assert run.source == config.parse().source and run.training == config.parse().training


def test_what_ends_a_text_comes_back(place, tmp_path):
    (tmp_path / "theirs").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(place / "theirs" / name, tmp_path / "theirs")
    tokenizer, _ = read_tokenizer(place / "theirs")
    (tmp_path / "theirs" / "tokenizer.json").write_text(tokenizer.replace("<|endoftext|>", "<end>"))
    named = ["TokenizersVocabularyConfig.end_token = '<end>'"]
    convert_from_huggingface(tmp_path / "theirs", [], named, tmp_path / "ours")
    convert_to_huggingface(tmp_path / "ours", tmp_path / "back")
    convert_from_huggingface(tmp_path / "back", [], [], tmp_path / "again")
    ours, again = (open_checkpoint(tmp_path / name).vocabulary for name in ("ours", "again"))
    assert (again.fingerprint, again.end_of_document) == (ours.fingerprint, 256)


def test_what_contradicts_is_named(place, tmp_path):
    def refused(message, *bindings):
        with pytest.raises(UserError, match=message):
            convert_from_huggingface(place / "theirs", [], bindings, tmp_path / "ours")

    refused("num_layers = 5, but .*theirs has 2", "PretrainedConfig.num_layers = 5")
    refused("window_length=100 is more than the max_positions=12", "PretrainedConfig.window_length = 100")
    refused("257 tokens and the vocabulary of the config 258", "VocabularyConfig.size_multiple = 2")
    # Before documents are prepared, too.
    with pytest.raises(UserError, match="257 tokens and the vocabulary of the config 258"):
        config_for_training(place / "theirs", read_changes((), ("VocabularyConfig.size_multiple = 2",)))
    # Segments are as long as it says.
    refused("PretrainedConfig.window_length='long' must be int", "PretrainedConfig.window_length = 'long'")
    with pytest.raises(UserError, match="windows with overlap=2 need RunConfig.data='windows', not 'lanes'"):
        train(run_of(place, "RunConfig.data = 'lanes'", "MeshConfig.data = 1"), tmp_path / "run")
    with pytest.raises(UserError, match="belongs to another config: PretrainedConfig.num_layers is"):
        train(run_of(place, "PretrainedConfig.num_layers = 1", "MeshConfig.data = 1"), tmp_path / "b", place / "ours")
