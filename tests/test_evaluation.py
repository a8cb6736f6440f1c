"""An evaluation equals a plain loop over documents for any number of lanes, segment length and mesh."""

import json
import math
import socket

import forked
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import with_mixer
from fake_split import FakeSplit
from tiny_run import environment

from meliad_like.errors import UserError
from meliad_like.evaluation.perplexity import Evaluator
from meliad_like.families.pretrained.config import PretrainedConfig
from meliad_like.mesh import MeshConfig, make_mesh, parameter_shardings
from meliad_like.mixers.recurrent_states import RecurrentStates
from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.model import Model
from meliad_like.studies.interventions import cleared

LENGTHS = [3, 70, 1, 17, 18, 33, 9, 2, 21, 40]
WINDOW = 8


class CountedSplit(FakeSplit):
    """A split of random tokens below 29, with numbers of bytes and words."""

    vocabulary_size = 32

    def __init__(self, lengths):
        super().__init__(lengths)
        self.num_bytes = 3 * (self.lengths - 1)
        self.num_words = self.lengths // 2

    def tokens(self, document, start, stop):
        return super().tokens(document, start, stop) * 7919 % 29


def make_model():
    sizes = {"num_layers": 2, "model_width": 16, "num_heads": 2, "head_size": 8, "feedforward_width": 16}
    config = DecoderConfig(**sizes, window_length=WINDOW, logit_scale=1.0)
    config = with_mixer(config, RecurrentStates(num_states=4), (1,))
    return Model(config, CountedSplit.vocabulary_size)


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def params(model):
    return jax.jit(model.init)(jax.random.key(0))


@pytest.fixture(scope="module")
def expected(model, params):
    """Returns (nats, correct) of every target of every document, each document read separately in one pass."""
    split = CountedSplit(LENGTHS)
    length = -(-max(LENGTHS) // WINDOW) * WINDOW

    @jax.jit
    def read(params, tokens):
        module = model.bind(params)
        start = jnp.arange(length // WINDOW)[None] == 0
        hidden, _ = module(tokens[None], module.init_carry(1), start)
        return module.logits(hidden)[0]

    losses = []
    for document, num_tokens in enumerate(LENGTHS):
        tokens = split.tokens(document, 0, num_tokens)
        logits = read(params, np.pad(tokens, (0, length - num_tokens)))[: num_tokens - 1]
        nats = -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), tokens[1:, None], 1)[:, 0]
        losses.append((nats.astype(np.float64), np.argmax(logits, -1) == tokens[1:]))
    return losses


def make_evaluator(model, mesh_shape=(1, 1, 1), segment_length=16, max_lanes=4, **arguments):
    mesh = make_mesh(MeshConfig(*mesh_shape), jax.devices()[: math.prod(mesh_shape)])
    split = CountedSplit(LENGTHS)
    evaluator = Evaluator(
        model, split, mesh, name="test", segment_length=segment_length, max_lanes=max_lanes, loss_slice=8, **arguments
    )
    return evaluator, parameter_shardings(mesh, model.axes, model.abstract_params)


@pytest.fixture(scope="module")
def evaluator(model):
    return make_evaluator(model)[0]


@pytest.mark.parametrize(
    ("mesh_shape", "max_lanes", "segment_length"),
    [((1, 1, 1), 1, 80), ((1, 1, 1), 3, 8), ((1, 2, 2, 2), 4, 48)],
)
def test_every_document_scores_as_if_read_alone(model, params, expected, mesh_shape, max_lanes, segment_length):
    evaluator, shardings = make_evaluator(model, mesh_shape, segment_length, max_lanes)
    evaluation = evaluator(jax.device_put(params, shardings))
    assert [document.num_tokens for document in evaluation.documents] == [length - 1 for length in LENGTHS]
    nats = [nats.sum() for nats, _ in expected]
    np.testing.assert_allclose([document.nats for document in evaluation.documents], nats, rtol=2e-6)
    correct = [correct.sum() for _, correct in expected]
    np.testing.assert_array_equal([document.num_correct for document in evaluation.documents], correct)


def test_the_curve_by_position(evaluator, params, expected):
    positions = evaluator(params).positions
    edges = [(0, 8), (8, 16), (16, 32), (32, 64), (64, 128)]
    assert [(bin.start, bin.stop) for bin in positions] == edges
    nats = [sum(nats[start:stop].sum() for nats, _ in expected) for start, stop in edges]
    np.testing.assert_allclose([bin.nats for bin in positions], nats, rtol=2e-6)
    tokens = [sum(len(nats[start:stop]) for nats, _ in expected) for start, stop in edges]
    assert [bin.num_tokens for bin in positions] == tokens


def test_the_curve_by_position_of_windows_that_overlap():
    """A token counts where it is, not where the window that predicts it begins."""
    sizes = {"num_layers": 1, "model_width": 16, "num_heads": 2, "num_key_value_heads": 2, "head_size": 8}
    config = PretrainedConfig(**sizes, feedforward_width=16, max_positions=WINDOW, window_length=WINDOW, overlap=5)
    model = Model(config, CountedSplit.vocabulary_size)
    evaluator, params = make_evaluator(model)[0], jax.jit(model.init)(jax.random.key(0))
    positions, losses = evaluator(params).positions, evaluator.token_losses(params)
    edges = [(0, 8), (8, 16), (16, 32), (32, 64), (64, 128)]
    assert [(bin.start, bin.stop) for bin in positions] == edges
    assert [bin.num_tokens for bin in positions] == [sum(len(nats[a:b]) for nats in losses) for a, b in edges]
    np.testing.assert_allclose(
        [bin.nats for bin in positions], [sum(nats[a:b].sum() for nats in losses) for a, b in edges], rtol=1e-5
    )


def test_whole_segments_of_windows_that_overlap():
    sizes = {"num_layers": 1, "model_width": 16, "num_heads": 2, "num_key_value_heads": 2, "head_size": 8}
    config = PretrainedConfig(**sizes, feedforward_width=16, max_positions=WINDOW, window_length=WINDOW, overlap=5)
    evaluator = make_evaluator(Model(config, CountedSplit.vocabulary_size), whole_segments=True)[0]
    steps = range(evaluator._reader.num_steps)
    starts = np.concatenate([evaluator._reader.batch(step, range(evaluator.num_lanes)).start for step in steps])
    assert starts[:, 0].sum() == sum(length > 1 for length in LENGTHS) and not starts[:, 1:].any()


def test_losses_by_token_are_what_an_evaluation_sums(evaluator, params, expected):
    losses = evaluator.token_losses(params)
    assert [len(nats) for nats in losses] == [length - 1 for length in LENGTHS]
    for nats, (wanted, _) in zip(losses, expected, strict=True):
        np.testing.assert_allclose(nats, wanted, rtol=1e-4, atol=1e-5)
    totals = [document.nats for document in evaluator(params).documents]
    np.testing.assert_allclose([nats.sum(dtype=np.float64) for nats in losses], totals, rtol=1e-14)


@pytest.mark.thorough
def test_whole_segments_change_nothing_but_where_states_are_cleared(model, params):
    kept = make_evaluator(model, whole_segments=True)[0].token_losses(params)
    for nats, wanted in zip(kept, make_evaluator(model, segment_length=8)[0].token_losses(params), strict=True):
        np.testing.assert_allclose(nats, wanted, rtol=1e-4, atol=1e-5)
    clearing = Model(cleared(model.config), model.vocabulary_size)
    one_lane, many = (
        make_evaluator(clearing, max_lanes=max_lanes, whole_segments=True)[0].token_losses(params)
        for max_lanes in (1, 4)
    )
    for nats, wanted, without in zip(one_lane, many, kept, strict=True):
        np.testing.assert_allclose(nats, wanted, rtol=1e-4, atol=1e-5)
        # Segments of 16: nothing is cleared before the 17th token of a document is read, and then something is.
        np.testing.assert_allclose(nats[:16], without[:16], rtol=1e-4, atol=1e-5)
        assert len(nats) <= 16 or abs(nats[16:] - without[16:]).max() > 1e-3


def test_a_segment_may_be_longer_than_all_documents(model, params, expected):
    evaluation = make_evaluator(model, segment_length=256, whole_segments=True)[0](params)
    nats = [nats.sum() for nats, _ in expected]
    np.testing.assert_allclose([document.nats for document in evaluation.documents], nats, rtol=2e-6)


def test_it_is_compiled_once(evaluator, params):
    first = evaluator(params)
    compiled = evaluator._compiled
    second = evaluator(jax.tree.map(lambda x: x + 0, params))
    assert evaluator._compiled is compiled
    assert first.documents == second.documents


def test_more_lanes_than_help_are_not_used(model):
    # 30 blocks, and the longest document has 9.
    assert make_evaluator(model, max_lanes=100)[0].num_lanes == 4
    assert make_evaluator(model, max_lanes=2)[0].num_lanes == 2
    assert make_evaluator(model, (8, 1, 1), max_lanes=2)[0].num_lanes == 8


def test_a_part_is_whole_documents_and_says_so(model, params, expected):
    evaluator, _ = make_evaluator(model, max_tokens=60)
    evaluation = evaluator(params)
    assert 0 < sum(LENGTHS[document] for document in evaluator.documents) <= 60
    assert evaluation.documents_in_split == len(LENGTHS) > evaluation.num_documents
    for document, score in zip(evaluator.documents, evaluation.documents, strict=True):
        assert score.name == f"document_{document}"
        assert score.nats == pytest.approx(expected[document][0].sum(), rel=2e-6)
    with pytest.raises(UserError, match="max_tokens=0 is less than the shortest document"):
        make_evaluator(model, max_tokens=0)


def test_progress_is_reported(evaluator, params):
    progress = []
    evaluator(params, lambda done, total: progress.append((done, total)))
    total = sum(LENGTHS) - len(LENGTHS)
    assert progress[-1] == (total, total) and len(progress) > 1 and sorted(progress) == progress


PROCESS = """
import jax, sys
from meliad_like.training.processes import initialize_distributed
initialize_distributed(f"localhost:{sys.argv[1]}", 2, int(sys.argv[2]))
from test_evaluation import make_evaluator, make_model
model = make_model()
evaluator, shardings = make_evaluator(model, (2, 1, 2))
params = jax.jit(model.init, out_shardings=shardings)(jax.random.key(0))
print([document.nats for document in evaluator(params).documents])
"""


@pytest.mark.thorough
def test_two_processes_both_know_every_document(expected):
    with socket.create_server(("localhost", 0)) as server:
        port = str(server.getsockname()[1])
    processes = [forked.Process(["-c", PROCESS, port, str(index)], environment(num_devices=2)) for index in range(2)]
    results = [json.loads(process.finish().stdout.splitlines()[-1]) for process in processes]
    assert results[0] == results[1]
    np.testing.assert_allclose(results[0], [nats.sum() for nats, _ in expected], rtol=2e-6)
