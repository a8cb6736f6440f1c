"""Ancient history as a reader: its batches, and two steps of training with it."""

import dataclasses
import json
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from fake_split import STRIDE, FakeSplit
from history_place import make_place
from tiny_run import read_metrics, train

from meliad_like import config
from meliad_like.data.token_store import TokenStore
from meliad_like.errors import UserError
from meliad_like.evaluation.perplexity import Evaluator
from meliad_like.history import commands
from meliad_like.history.commands import HistoryRequest
from meliad_like.history.config import AncientHistoryReaderConfig, HistoryReader, make_selection
from meliad_like.history.evaluation import evaluate
from meliad_like.history.gains import TargetLosses
from meliad_like.history.selection import Ranking
from meliad_like.history.settings import HistoryConfig
from meliad_like.history.spans import Layout, stride_of
from meliad_like.mesh import MeshConfig, make_mesh
from meliad_like.run.opening import open_checkpoint
from meliad_like.vocabularies.base import ByteVocabulary

# A window of 12 is three blocks of 4: spans of 2 fill up to 4, 8 are recent, 3 of them targets.
CONFIG = HistoryConfig(window_length=12, history_length=4, span_length=2, stride=3, separator="")
READER = ["TrainingConfig.num_steps = 2", "TrainingConfig.log_every = 1"]


def make(lengths, num_lanes=1, split=FakeSplit, config=CONFIG, **changes):
    fields = {"layout": Layout(config, None), "selection": first_spans, "shuffle": False, "epochs": 1, **changes}
    return HistoryReader(split(lengths), num_lanes, 24, 4, **fields)


def reading(history, selection, selections=""):
    return AncientHistoryReaderConfig(history=history, selection=selection, selections=str(selections))


def first_spans(name, document, stride):
    assert len(document) == stride.end
    return np.array([2, 5])


def windows(reader):
    """The windows of all lanes and steps: (document, positions of blocks, inputs, targets that count), if not idle."""
    found = []
    for step in range(reader.num_steps):
        batch = reader.batch(step, range(reader.num_lanes))
        for lane in range(reader.num_lanes):
            for first in range(0, reader.segment_length, 12):
                tokens, blocks = np.s_[lane, first : first + 12], np.s_[lane, first // 4 : first // 4 + 3]
                if batch.document[blocks][0] >= 0:
                    assert batch.start[blocks].tolist() == [True, False, False]
                    found.append((
                        int(batch.document[blocks][0]), batch.position[blocks].tolist(), batch.inputs[tokens].tolist(),
                        batch.targets[tokens][batch.loss_mask[tokens]].tolist(),
                    ))  # fmt: skip
                else:
                    assert not batch.loss_mask[tokens].any()
    return found


def test_the_windows_of_a_document():
    read = windows(make([29]))
    assert [(positions, targets) for _, positions, _, targets in read] == [
        ([0, 4, 8], list(range(1, 12))),
        ([3, 7, 11], [12, 13, 14]),
        ([6, 10, 14], [15, 16, 17]),
        ([9, 13, 17], [18, 19, 20]),
        ([12, 16, 20], [21, 22, 23]),
        ([15, 19, 23], [24, 25, 26]),
        ([18, 22, 26], [27, 28]),
    ]
    assert read[3][2] == list(range(9, 21))
    assert read[4][2] == [0, 1, 3, 4, *range(16, 24)]
    assert read[6][2] == [0, 1, 3, 4, *range(22, 29), 0]


@pytest.mark.parametrize("stride", [1, 3, 5, 8])
def test_every_token_after_the_first_is_predicted_once(stride):
    lengths = [1, 2, 9, 12, 13, 14, 40, 31]
    changed = HistoryConfig(window_length=12, history_length=4, span_length=2, stride=stride, separator="")
    read = windows(make(lengths, num_lanes=2, config=changed))
    found = sorted(target for *_, targets in read for target in targets)
    assert found == [STRIDE * d + i for d, length in enumerate(lengths) for i in range(1, length)]


def test_lanes_are_made_separately_and_orders_depend_on_the_seed():
    reader = make([90, 50, 70, 20], num_lanes=3, shuffle=True, epochs=None, seed=1)
    whole = reader.batch(4, [0, 1, 2])
    for name, values in reader.batch(4, [2, 0])._asdict().items():
        np.testing.assert_array_equal(values, getattr(whole, name)[[2, 0]])
    other = make([90, 50, 70, 20], num_lanes=3, shuffle=True, epochs=None, seed=2)
    assert any((other.batch(i, [0]).inputs != reader.batch(i, [0]).inputs).any() for i in range(5))


@pytest.mark.parametrize("name", ["random", "recent", "prefix_overlap"])
def test_spans_are_chosen_among_all_candidates(name):
    of_all, of_some = (
        make_selection(dataclasses.replace(CONFIG, max_candidates=most), name, "", None, "train")[0]
        for most in (None, 2)
    )
    stride, tokens = stride_of(30, 100, CONFIG), np.arange(100) % 7
    assert of_all("", tokens, stride).tolist() == of_some("", tokens, stride).tolist()


class Letters(FakeSplit):
    def tokens(self, document, start, stop):
        return super().tokens(document, start, stop) % 7 + 97


@pytest.mark.parametrize("name", ["random", "recent", "prefix_overlap"])
def test_the_shipped_files_read_bytes(name):
    files = [
        "size/small_37m.gin",
        "task/books.gin",
        "block_recurrent/slide_12l.gin",
        f"ancient_history/train_{name}.gin",
    ]
    run, store = config.parse(files, []), SimpleNamespace(vocabulary=ByteVocabulary())
    reader = run.data.evaluation_reader(store, "train", 512)(Letters([3000]), 1)
    inputs = np.concatenate([reader.batch(step, [0]).inputs for step in range(reader.num_steps)])
    # Windows that end at 2048 and later have eight spans, each with a line break in its last place.
    assert (inputs == 10).sum() == 5 * 8


def test_every_document_is_copied_from_the_store_once():
    lengths, read = [400, 300, 500, 350], []

    class Counting(FakeSplit):
        def tokens(self, document, start, stop):
            read.append((document, stop - start))
            return super().tokens(document, start, stop)

    assert len(windows(make(lengths, 2, Counting))) > 400
    assert sorted(read) == list(enumerate(lengths))


def test_padding_share():
    # 11 targets, and six windows of three but for the last of two.
    assert make([29]).padding_share == pytest.approx(1 - 28 / (8 * 12))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("history")
    return folder, make_place(folder)


def run_of(place, *more):
    return config.parse([], [*place[1], *READER, "MeshConfig.data = 1", *more])


SLIDE = [
    "RunConfig.model = 'decoder'",
    "DecoderConfig.num_layers = 1",
    "DecoderConfig.model_width = 8",
    "DecoderConfig.num_heads = 2",
    "DecoderConfig.head_size = 4",
    "DecoderConfig.feedforward_width = 8",
    "DecoderConfig.window_length = 8",
]
SHORTFORMER = [
    "RunConfig.model = 'shortformer'",
    "ShortformerConfig.num_layers = 1",
    "ShortformerConfig.model_width = 8",
    "ShortformerConfig.num_heads = 2",
    "ShortformerConfig.head_size = 4",
    "ShortformerConfig.feedforward_width = 8",
    "ShortformerConfig.window_length = 8",
    "ShortformerConfig.cache_length = 8",
    "ShortformerConfig.cutoffs = ()",
]


def without_model(bindings):
    return [binding for binding in bindings if not binding.startswith(("RunConfig.model", "PretrainedConfig."))]


@pytest.mark.thorough
@pytest.mark.parametrize("model", [SLIDE, SHORTFORMER], ids=["slide", "shortformer"])
def test_other_families_are_trained_and_evaluated(place, model, tmp_path):
    bindings = [*without_model(place[1]), *READER, *model, "MeshConfig.data = 1", "TrainingConfig.evaluate_every = 2"]
    train(config.parse([], bindings), tmp_path)
    assert [np.isfinite(metrics["loss"]) for metrics in read_metrics(tmp_path)] == [True, True]
    assert [metrics["step"] for metrics in read_metrics(tmp_path, "validation")] == [2]


def test_an_evaluation_with_the_reader_is_that_of_the_command(place):
    """Of `evaluation.evaluate` every stride is read by itself; here a document's first ones are read together."""
    run = run_of(place, "MeshConfig.data = -1")
    opened = open_checkpoint(place[0] / "model", mesh="config")
    store = TokenStore(run.data.store)
    split = store.split("test")
    evaluator = Evaluator(
        opened.model, split, opened.mesh, name="test", segment_length=24, max_lanes=8,
        read=opened.run.data.evaluation_reader(store, "test", 24),
    )  # fmt: skip
    nats = [document.nats for document in evaluator(opened.params).documents]
    single = make_mesh(MeshConfig(data=1), jax.devices()[:1])
    params = jax.device_put(opened.params, jax.devices()[0])
    losses = TargetLosses(opened.model, params, single, length=24, max_targets=4, batch_size=4)
    layout = Layout.of(run.data.history, store.vocabulary)
    evaluation = evaluate(losses, split, [Ranking("random", run.data.history)], layout)
    np.testing.assert_allclose(nats, evaluation.of("random")["nats"], rtol=1e-5)
    assert abs(evaluation.of("random") - evaluation.of("baseline"))["nats"].max() > 0.01


def test_selections_made_in_advance(place, tmp_path):
    request = HistoryRequest(str(place[0] / "model"), split="train", batch_size=8)
    commands.select(request, tmp_path / "train", ["recent"])
    run, store = run_of(place), TokenStore(place[0] / "store")
    configs = [reading(run.data.history, *kind) for kind in (("file", tmp_path), ("recent",), ("random",))]
    fields = {"documents": store.split("train"), "num_lanes": 1, "window_length": 24}
    configs = [dataclasses.replace(config, segment_length=24, tokens_per_step=24) for config in configs]
    readers = [config.make(store, "train", **fields) for config in configs]
    batches = [[reader.batch(step, [0]).inputs for step in range(20)] for reader in readers]
    np.testing.assert_array_equal(batches[0], batches[1])
    assert np.not_equal(batches[0], batches[2]).any()
    with pytest.raises(UserError, match="scores or selections are missing at .*validation: "):
        make_selection(run.data.history, "file", str(tmp_path), store, "validation")
    other = config.parse([], [*place[1], "HistoryConfig.first_selection = 1"]).data.history
    with pytest.raises(UserError, match="HistoryConfig.first_selection is None there, 1 here"):
        make_selection(other, "file", str(tmp_path), store, "train")


@pytest.mark.thorough
def test_what_an_oracle_selected_says_in_every_output_that_it_leaks(place, tmp_path, capsys):
    for split in ("train", "test"):
        request = HistoryRequest(str(place[0] / "model"), split=split, batch_size=8)
        commands.select(request, tmp_path / split, ["overlap_oracle"])
    bindings = [
        "AncientHistoryReaderConfig.selection = 'file'",
        f"AncientHistoryReaderConfig.selections = '{tmp_path}'",
        "TrainingConfig.evaluate_every = 2",
        "TrainingConfig.evaluate_split = 'test'",
    ]
    train(run_of(place, *bindings), tmp_path / "run")
    printed = capsys.readouterr().out
    assert "padding; selections leak the future" in printed
    assert "bits/byte on test (leaks the future): " in printed
    assert printed.count("epochs  leaks the future") == 2
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {row["kind"] for row in rows} == {"train (leaks the future)", "test (leaks the future)"}


@pytest.mark.parametrize(
    ("bindings", "message"),
    [
        (
            ["PretrainedConfig.window_length = 12", "ReaderConfig.segment_length = 12"],
            "segment_length=12 must be a multiple of HistoryConfig.window_length=24",
        ),
        (["PretrainedConfig.window_length = 12"], "HistoryConfig.window_length=24 needs a model with window_length=24"),
        (["PretrainedConfig.overlap = 3"], "needs a model with window_length=24 and overlap=0"),
        (["AncientHistoryReaderConfig.selection = 'file'"], "selection='file' does not fit selections='': 'file', and"),
        (["AncientHistoryReaderConfig.selections = 'x'"], "selection='random' does not fit selections='x': 'file', "),
    ],
)
def test_what_does_not_fit(place, bindings, message):
    replaced = {binding.partition(" =")[0] for binding in bindings}
    kept = [binding for binding in place[1] if binding.partition(" =")[0] not in replaced]
    with pytest.raises(UserError, match=message):
        config.parse([], [*kept, *READER, *bindings])
