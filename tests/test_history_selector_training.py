"""Training of selectors of ancient history: the examples, their order, and that an interrupted run resumes."""

import dataclasses
import json
import os
import signal

import numpy as np
import pandas as pd
import pytest
from selector_runs import HISTORY, TRAINING, VOCABULARY, MadeUp, pairs_of, selector_of, train
from tiny_run import assert_same_bits, read_metrics

from meliad_like.errors import UserError
from meliad_like.history.selectors.inputs import (
    PairsReader,
    agreement,
    document_texts,
    held_out,
    make_inputs,
)
from meliad_like.history.selectors.scorer import open_selector
from meliad_like.history.selectors.training import SelectorTraining
from meliad_like.history.settings import SelectorConfig
from meliad_like.optimization.optimizers import Adam
from meliad_like.training.processes import EXIT_STATUS


def place(document, stride, end):
    return pd.DataFrame({"document": [document], "stride": [stride], "end": [end]})


def changed(**changes):
    return dataclasses.replace(TRAINING, **changes)


def test_what_is_read_at_a_place():
    tokens = MadeUp().tokens(1, 0, 75)
    places, last = (place(1, number, 10) for number in (4, 9))
    # The stride's targets are the tokens from 32 to 40; the span has the separator in its last place.
    span = [*tokens[6:9], 10]

    def read(places=places, **changes):
        texts = document_texts(make_inputs(HISTORY, SelectorConfig(**changes), VOCABULARY), MadeUp())(places)
        return texts.tokens[0].tolist(), texts.length.tolist()

    assert read() == ([*span, *tokens[24:32]], [12])
    assert read(context_tokens=2) == ([*span, *tokens[30:32]], [6])
    # Before the document's beginning there is nothing.
    assert read(context_tokens=40) == ([*span, *tokens[:32], *[0] * 8], [36])
    assert read(context="released_code") == ([*span, *tokens[24:40]], [20])
    # The last stride predicts the tokens from 72 to 75, and the authors' code reads 16 tokens up to its end as well.
    assert read(last) == ([*span, *tokens[64:72]], [12])
    assert read(last, context="released_code") == ([*span, *tokens[59:75]], [20])


def test_nothing_to_read_is_named():
    full = dataclasses.replace(HISTORY, stride=16)
    with pytest.raises(UserError, match="history_length=8 and stride=16 leave no prefix in window_length=24"):
        make_inputs(full, SelectorConfig(), VOCABULARY)
    assert make_inputs(full, SelectorConfig(context_tokens=5), VOCABULARY).context_length == 5
    with pytest.raises(UserError, match="context_tokens=5 has no effect on SelectorConfig.context='released_code'"):
        SelectorConfig(context="released_code", context_tokens=5)


def test_a_place_costs_the_same_wherever_it_is():
    """Its stride is found by its number, without those before it."""

    class Endless(MadeUp):
        lengths = np.array([10**12])

        def tokens(self, document, start, stop):
            return np.broadcast_to(np.int32(97), stop - start)

    texts = document_texts(make_inputs(HISTORY, SelectorConfig(), VOCABULARY), Endless())
    far = place(0, 10**11, 10)
    assert texts(far).tokens.tolist() == [[97] * 3 + [10] + [97] * 8]


def test_documents_are_held_out():
    train_pairs, validation = held_out(pairs_of(), 3)
    assert set(train_pairs["document"]) == {1, 2, 4} and set(validation["document"]) == {0, 3}
    assert len(train_pairs) + len(validation) == len(pairs_of())
    with pytest.raises(UserError, match="of 1 scored documents there is none to train on with .*validation_every=9"):
        held_out(pairs_of()[:1], 9)


def test_the_order_hangs_on_seed_and_step_alone():
    pairs = pd.DataFrame({"score": np.arange(10, dtype=np.float32)})
    reader, other = (PairsReader(pairs, lambda places: places["score"], 4, seed) for seed in (0, 1))
    later, rows = reader.rows(3), [reader.rows(step) for step in range(5)]
    assert later.tolist() == rows[3].tolist()
    batch = reader.batch(3, [2, 0])
    assert batch.scores.tolist() == batch.texts.tolist() == later[[2, 0]].tolist()
    # Two epochs, in a batch of which one goes over into the other.
    epochs = np.concatenate(rows).reshape(2, 10)
    assert [sorted(epoch) for epoch in epochs.tolist()] == [list(range(10))] * 2
    assert epochs[0].tolist() != epochs[1].tolist() != other.rows(0).tolist()


def test_how_predictions_agree_with_scores():
    scores = np.array([1, 2, 6, -4, 0], np.float32)
    pairs = pd.DataFrame({"document": [0, 0, 0, 1, 1], "stride": 5, "end": range(5), "score": scores})
    figures = agreement(np.array([1.0, 3, 2, 0, -1]), pairs, num_spans=2)
    assert figures["loss"] == pytest.approx((0 + 1 + 16 + 16 + 1) / 5)
    assert figures["chosen_gain"] == pytest.approx((4 - 2) / 2)
    assert figures["oracle_gain"] == pytest.approx((4 - 2) / 2)
    assert figures["random_gain"] == pytest.approx((3 - 2) / 2)
    one = agreement(np.array([1.0, 3, 2, 0, -1]), pairs, num_spans=1)
    assert (one["chosen_gain"], one["oracle_gain"]) == ((2 - 4) / 2, (6 + 0) / 2)
    assert figures["correlation"] == pytest.approx(np.corrcoef([1, 3, 2, 0, -1], scores)[0, 1])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("selector")
    assert train(folder) == 0
    return folder


@pytest.mark.thorough
def test_a_resumed_run_equals_an_uninterrupted_one(undisturbed, tmp_path, monkeypatch):
    report = SelectorTraining.report

    def stop_at_four(self, writer, step, metrics, state):
        report(self, writer, step, metrics, state)
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(SelectorTraining, "report", stop_at_four)
        assert train(tmp_path) == EXIT_STATUS
    assert train(tmp_path) == 0
    assert_same_bits(open_selector(tmp_path).params, open_selector(undisturbed).params)
    # It stopped at step 5, between two logs.
    for kind in ("train", "validation"):
        assert list(read_metrics(tmp_path, kind)) == list(read_metrics(undisturbed, kind))


@pytest.mark.thorough
def test_devices_share_the_pairs_of_a_batch(undisturbed, tmp_path):
    assert train(tmp_path, num_devices=4) == 0
    for one, four in zip(read_metrics(undisturbed), read_metrics(tmp_path), strict=True):
        assert four["loss"] == pytest.approx(one["loss"], rel=1e-4)
    for one, four in zip(read_metrics(undisturbed, "validation"), read_metrics(tmp_path, "validation"), strict=True):
        assert four["loss"] == pytest.approx(one["loss"], rel=1e-4)


def test_it_learns_and_keeps_the_best(undisturbed):
    by_step = {metrics["step"]: metrics["loss"] for metrics in read_metrics(undisturbed, "validation")}
    opened = open_selector(undisturbed)
    assert set(by_step) == {3, 6} and opened.step == min(by_step, key=by_step.__getitem__)
    assert [metrics["step"] for metrics in read_metrics(undisturbed)] == [2, 4, 6]
    first, *_, last = read_metrics(undisturbed)
    assert last["loss"] < first["loss"]
    _, encoder, _ = selector_of()
    assert not np.array_equal(opened.params["encoder"]["embedding"], encoder["embedding"])


@pytest.mark.thorough
def test_a_selector_learns_what_spans_are_worth(tmp_path):
    """On documents that were not trained on."""
    longer = changed(num_steps=300, batch_size=16, log_every=300, evaluate_every=300, checkpoint_every=0)
    train(tmp_path, longer)
    (figures,) = read_metrics(tmp_path, "validation")
    assert figures["correlation"] > 0.8
    reached = (figures["chosen_gain"] - figures["random_gain"]) / (figures["oracle_gain"] - figures["random_gain"])
    assert reached > 0.5


def test_a_batch_that_devices_can_not_share_is_named(tmp_path):
    with pytest.raises(UserError, match="batch_size=4 must be a multiple of the 3 devices that share a batch"):
        train(tmp_path, num_devices=3)


def test_another_training_in_the_folder_is_refused(undisturbed):
    with pytest.raises(UserError, match="training.Adam.base_rate is 0.01 there, 0.02 here"):
        train(undisturbed, changed(optimizer=Adam(base_rate=0.02)))
    saved = json.loads((undisturbed / "selector.json").read_text())
    assert saved["trained_on"] == {"scores": "made up"} and saved["training"]["Adam.base_rate"] == 0.01


def test_a_loss_that_is_not_finite_stops(tmp_path):
    with pytest.raises(
        UserError, match="the loss, the gradient or the parameters of step [12] are not finite; .*Adam.base_rate"
    ):
        train(tmp_path, changed(optimizer=Adam(base_rate=1e30)))
    assert not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"validation_every": 1}, "validation_every=1 holds all documents out: it must be at least 2"),
        # jax takes seeds modulo 2**32, and none that are longer than 64 bits.
        ({"seed": 2**32}, "SelectorTrainingConfig.seed=4294967296 must not be negative, and below 2\\*\\*32"),
    ],
)
def test_settings_are_checked(changes, message):
    with pytest.raises(UserError, match=message):
        changed(**changes)
