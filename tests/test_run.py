"""One way from a config or a folder to something that runs."""

import dataclasses
import json

import numpy as np
import pytest
from history_place import make_place

from meliad_like.data.readers import LanesReaderConfig
from meliad_like.data.token_store import TokenStore
from meliad_like.evaluation.perplexity import make_evaluator
from meliad_like.experiments.evaluations import by_document
from meliad_like.run.opening import open_checkpoint
from meliad_like.studies import readings
from meliad_like.training.metrics import Unlogged


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("history")
    make_place(folder)
    return folder


def test_studies_and_tables_read_a_run_of_ancient_history_with_its_spans(place, tmp_path):
    opened = open_checkpoint(place / "model", mesh="config")
    store = TokenStore(opened.run.data.store)
    documents = store.split("test").subset(np.array([1, 0]))

    def evaluate(run):
        evaluator = make_evaluator(run, opened.model, store, "test", opened.mesh, documents=documents)
        return np.array([document.nats for document in evaluator(opened.params).documents])

    in_order = dataclasses.replace(opened.run, data=LanesReaderConfig(segment_length=24, tokens_per_step=192))
    with_spans, without = evaluate(opened.run), evaluate(in_order)
    assert abs(with_spans - without).max() > 0.01

    studied = readings.open_studied(str(place / "model"))
    read = readings.read(studied, readings.Selection(store, "test", documents, 2))
    np.testing.assert_allclose([losses.sum(dtype=np.float64) for losses in read.losses], with_spans, rtol=1e-6)

    by_document(opened, opened.mesh, store, "test", documents, tmp_path / "test.json")
    saved = json.loads((tmp_path / "test.json").read_text())
    np.testing.assert_allclose([document["nats"] for document in saved["documents"]], with_spans, rtol=1e-6)


def test_a_subset_of_a_subset_knows_the_places_in_the_split(place):
    split = TokenStore(place / "store").split("train")
    some = split.subset(np.array([2, 0, 1]))
    fewer = some.subset(np.array([2, 0]))
    assert fewer.indices.tolist() == [1, 2] and list(fewer.names) == [split.names[1], split.names[2]]
    np.testing.assert_array_equal(fewer.tokens(1, 0, 5), split.tokens(2, 0, 5))


def test_steps_of_padding_alone_have_no_average():
    """The last steps of a stage may have no target in any lane."""
    unlogged = Unlogged()
    for weight, loss in ((0, 0), (3, 2), (1, 6)):
        unlogged.add(weight, {"loss": np.float32(loss)})
    assert unlogged.take() == ({"loss": 3}, 4)
    unlogged.add(0, {"loss": np.float32(0)})
    assert unlogged.take() == ({}, 0)
