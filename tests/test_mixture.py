"""Mixtures of token stores: shares, orders, and a run that is stopped and resumed."""

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_run
from fake_split import STRIDE, FakeSplit
from tiny_run import assert_same_bits, parse, read_metrics, set_up, train

from meliad_like.data.mixture import MixedSchedule, MixtureReader
from meliad_like.data.preparation import prepare
from meliad_like.data.split import Documents
from meliad_like.errors import UserError
from meliad_like.run.setup import starting_state
from meliad_like.training.checkpoints import Checkpoints

SHORT, LONG = np.random.default_rng(0).integers(2, 30, 50), np.random.default_rng(1).integers(2, 400, 20)


def reader(weights=(0.7, 0.3), num_lanes=8, seed=0, **arguments):
    documents = Documents.joined([FakeSplit(SHORT), FakeSplit(LONG)], ["short/", "long/"])
    return MixtureReader(documents, num_lanes, 16, 4, seed, weights=weights, **arguments)


def sources(schedule: MixedSchedule, num_blocks: int) -> np.ndarray:
    """int[lanes, blocks]: the source that each lane reads at each block; it is never idle."""
    found = np.full((schedule.num_lanes, num_blocks), -1)
    for lane in range(schedule.num_lanes):
        for run in schedule.runs(lane, 0, num_blocks):
            source = np.searchsorted(np.cumsum(schedule.sizes), run.document, "right")
            found[lane, run.block : run.block + run.num_blocks] = source
    assert (found >= 0).all()
    return found


def test_joined_documents_are_those_of_the_parts():
    joined = Documents.joined([FakeSplit(SHORT), FakeSplit(LONG)], ["short/", "long/"])
    assert joined.sizes == (50, 20) and len(joined) == 70
    assert [joined.names[i] for i in (0, 49, 50)] == ["short/document_0", "short/document_49", "long/document_0"]
    assert joined.lengths.tolist() == [*SHORT, *LONG]
    for document in (0, 49, 50, 69):
        expected = STRIDE * (document - 50 * (document >= 50)) + 1
        assert joined.tokens(document, 1, 2).tolist() == [expected]


@pytest.mark.parametrize("num_lanes", [1, 3, 10])
def test_shares_hold_at_every_block_where_documents_are_short(num_lanes):
    schedule = MixedSchedule(np.ones(30, int), num_lanes, 0, sizes=(10, 10, 10), shares=(0.5, 0.3, 0.2))
    read = np.stack([(sources(schedule, 100) == source).sum(0).cumsum() for source in range(3)])
    expected = np.array([[0.5], [0.3], [0.2]]) * num_lanes * np.arange(1, 101)
    assert np.abs(read - expected).max() <= 1


def test_shares_hold_in_the_long_run_and_from_the_beginning():
    found = sources(MixedSchedule(np.array([1] * 20 + [90] * 5), 10, 3, sizes=(20, 5), shares=(0.4, 0.6)), 4000)
    # Lanes that read a long document can't be given to the other source before its end.
    assert np.abs((found == 0).cumsum(1).sum(0) - 4 * np.arange(1, 4001)).max() <= 90 * 6
    assert (found[:, :90] == 0).mean() == 0.4
    assert (found == 0).mean() == pytest.approx(0.4, abs=2e-3)


def test_targets_have_the_weights_although_short_documents_are_padded():
    read = reader(weights=(1, 3))
    batches = [read.batch(step, range(8)) for step in range(400)]
    mask = np.stack([batch.loss_mask for batch in batches])
    short = np.repeat(np.stack([batch.document for batch in batches]) < 50, 4, axis=2)
    assert (mask & short).sum() / mask.sum() == pytest.approx(0.25, abs=2e-3)
    assert 1 - mask.mean() == pytest.approx(read.padding_share, abs=2e-3)


def test_each_source_is_read_once_in_each_of_its_epochs():
    schedule = MixedSchedule(np.array([2] * 5 + [3] * 7), 1, 0, sizes=(5, 7), shares=(0.5, 0.5))
    runs = [run.document for run in schedule.runs(0, 0, 300)]
    for members, size in ((range(5), 5), (range(5, 12), 7)):
        order = [document for document in runs if document in members]
        epochs = [order[i : i + size] for i in range(0, len(order) - size, size)]
        assert all(sorted(epoch) == list(members) for epoch in epochs) and epochs[0] != epochs[1]


def test_a_batch_depends_on_seed_and_step_alone():
    forwards, backwards, other = reader(), reader(), reader(seed=1)
    steps = {step: forwards.batch(step, range(8)) for step in range(40)}
    for step in reversed(range(40)):
        jax.tree.map(
            np.testing.assert_array_equal, backwards.batch(step, [5, 2]), jax.tree.map(lambda x: x[[5, 2]], steps[step])
        )
    assert any((other.batch(step, range(8)).inputs != steps[step].inputs).any() for step in range(40))


def test_a_source_without_targets_is_an_error():
    with pytest.raises(UserError, match="no document of source 1 has a token to predict"):
        MixedSchedule(np.array([1, 0]), 2, 0, sizes=(1, 1), shares=(0.5, 0.5))


@pytest.fixture(scope="module")
def bindings(tmp_path_factory):
    """A run on a mixture of the store of `tiny_run` and one of other documents."""
    folder = tmp_path_factory.mktemp("mixture")
    first = tiny_run.make_bindings(folder / "first")
    for i in range(12):
        path = folder / "digits" / "train" / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("0123456789" * (1 + i))
    run = parse(first, f"FolderSourceConfig.folder = '{folder / 'digits'}'")
    prepare(run.source, run.vocabulary, folder / "digits_store", num_workers=1)
    others = f"MixtureReaderConfig.other_stores = ('{folder / 'digits_store'}',)"
    return [*first, "RunConfig.data = 'mixture'", others, "MixtureReaderConfig.weights = (1, 1)"]


@pytest.mark.exhaustive
def test_a_run_resumes_exactly(bindings, tmp_path):
    """Also after one of the stores has grown: the run reads the version that it began with."""
    whole = parse(bindings, "TrainingConfig.num_steps = 4", "RunConfig.schedule = 'constant'")
    train(whole, tmp_path / "whole")
    train(dataclasses.replace(whole, training=dataclasses.replace(whole.training, num_steps=2)), tmp_path / "parts")
    setup = set_up(whole)
    digits = whole.data.other_stores[0].removesuffix("_store")
    Path(digits, "train", "more.txt").write_text("987" * 50)
    source = dataclasses.replace(whole.source, folder=digits)
    assert prepare(source, whole.vocabulary, whole.data.other_stores[0], num_workers=1).version == 2
    train(whole, tmp_path / "parts")
    states = []
    for name in ("whole", "parts"):
        with Checkpoints(tmp_path / name / "checkpoints", read_only=True) as checkpoints:
            states.append(starting_state(setup, checkpoints, None))
    assert_same_bits(*states)
    losses = [[row["loss"] for row in read_metrics(tmp_path / name)] for name in ("whole", "parts")]
    assert losses[0] == losses[1] and len(losses[0]) == 4


def test_bits_per_byte_are_of_the_mixture(bindings):
    setup = set_up(parse(bindings))
    one, other = (store.totals("train") for store in setup.stores)
    ratios = [each.bytes / (each.tokens - each.documents) for each in (one, other)]
    assert setup.run.data.bytes_per_target([one, other]) == pytest.approx(sum(ratios) / 2)
    names = {setup.reader.documents.names[i].split("/")[-2] for i in setup.reader.batch(0, range(8)).document.ravel()}
    assert names == {"store", "digits_store"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "MixtureReaderConfig.weights = (1,)",
            r"weights=\(1.0,\) must have a number above 0 for ReaderConfig.store and",
        ),
        ("MixtureReaderConfig.weights = (1, 0)", "must have a number above 0"),
        ("MixtureReaderConfig.other_stores = ('nowhere',)", "nowhere"),
        ("VocabularyConfig.size_multiple = 7", "was made by other vocabulary settings"),
    ],
)
def test_mistakes_are_named(bindings, change, message):
    with pytest.raises(UserError, match=message):
        set_up(parse([*bindings, change]))


def test_a_store_that_is_given_twice_is_refused(bindings, tmp_path):
    """Also under another name."""
    store = parse(bindings).data.store
    (tmp_path / "again").symlink_to(store)
    for other in (store, tmp_path / "again"):
        with pytest.raises(UserError, match="have the same documents: name one of them"):
            set_up(parse(bindings, f"MixtureReaderConfig.other_stores = ('{other}',)"))


def test_stores_of_different_vocabularies_are_refused(bindings, tmp_path):
    run = parse(bindings, "VocabularyConfig.size_multiple = 16")
    prepare(run.source, run.vocabulary, tmp_path / "other", num_workers=1)
    with pytest.raises(UserError, match=r"have different vocabularies: prepare the second with FileVocabularyConfig"):
        set_up(parse(bindings, f"MixtureReaderConfig.other_stores = ('{tmp_path / 'other'}',)"))
