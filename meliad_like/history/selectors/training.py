"""Training of a selector: squared error on scored spans (Ancient History Language Models, section 2)."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
from jax.sharding import Mesh
from jaxtyping import Array, Float

from meliad_like.config.run import TrainingConfig
from meliad_like.data.loading import load_batches
from meliad_like.data.readers import label
from meliad_like.data.subset import Documents
from meliad_like.data.vocabulary import Vocabulary
from meliad_like.errors import UserError
from meliad_like.evaluation.report import with_progress
from meliad_like.history.selectors.checkpoint import FILE_NAME, read_metadata, save_encoder, selector_metadata
from meliad_like.history.selectors.config import SelectorTrainingConfig
from meliad_like.history.selectors.inputs import DocumentTexts, SelectorInputs
from meliad_like.history.selectors.model import Params, Selector
from meliad_like.history.selectors.pairs import Inputs, PairsBatch, PairsReader, agreement, held_out
from meliad_like.history.selectors.vectors import encode_places, moments
from meliad_like.mesh import lane_sharding
from meliad_like.optimization.optimizers import leave_fixed, make_optimizer
from meliad_like.registry import to_plain
from meliad_like.resumable import check_same, write_json
from meliad_like.run.opening import save_vocabulary
from meliad_like.training.checkpoints import Checkpoints, keep_best
from meliad_like.training.loop import Hook, Loop, open_session
from meliad_like.training.metrics import MetricsWriter
from meliad_like.training.preemption import EXIT_STATUS
from meliad_like.training.program import Program, lay_out
from meliad_like.training.step import Objective, StepMetrics, Sums, TrainState, make_step

MAY_CHANGE = [
    f"training.{field.name}" for field in dataclasses.fields(SelectorTrainingConfig) if "resumable" in field.metadata
]
"""Settings that may change when a training is resumed."""
Feed = Callable[[np.ndarray], Inputs]
"""From rows of some pairs to what the selector reads."""


def predict(selector: Selector, params: Params, inputs: Inputs, dropout_key=None) -> Float[Array, " b"]:
    """Scores of a batch."""
    if selector.config.train_encoder:
        vectors = {}
        for i, (part, (tokens, length)) in enumerate(inputs.items()):
            key = None if dropout_key is None else jax.random.fold_in(dropout_key, i)
            vectors[part] = selector.encode(params["encoder"], tokens, length, key)
        inputs = vectors
    return selector.score_vectors(params, inputs)


def squared_error(selector: Selector) -> Objective:
    """The mean squared error of a batch, in nats squared."""

    def differentiable(params, carry, batch: PairsBatch, dropout_key):
        errors = jnp.square(predict(selector, params, batch.inputs, dropout_key) - batch.scores)
        sums = Sums(jnp.sum(errors), jnp.zeros((), jnp.int32), jnp.asarray(len(errors)))
        return sums.loss, (sums, carry, jnp.isfinite(errors))

    return Objective(differentiable, lambda batch: len(batch.scores), lambda params, lanes: {})


def make_program(selector: Selector, config: SelectorTrainingConfig, batch: PairsBatch, mesh: Mesh) -> Program:
    """The selector and its step on a mesh; the encoder's parameters are zeros at first, and only there if trained.

    Raises:
      UserError: the devices can't share a batch evenly.
    """
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    if config.batch_size % shards:
        raise UserError(
            f"SelectorTrainingConfig.batch_size={config.batch_size} must be a multiple of the {shards} devices that "
            "share a batch"
        )
    optimizer = make_optimizer(config.optimizer, optax.constant_schedule(1.0))
    optimizer = leave_fixed(optimizer, selector.fixed_parameters)

    def init_params(key) -> Params:
        params = selector.init(key)
        if selector.config.train_encoder:
            params["encoder"] = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), selector.encoder.abstract_params)
        return params

    def init(key) -> TrainState:
        params = init_params(key)
        count = jnp.zeros((), jnp.int32)
        return TrainState(count, params, optimizer.init(params), {}, count, jnp.zeros((), bool))

    shapes = jax.eval_shape(init_params, jax.random.key(0))
    axes = jax.tree.map(lambda x: (None,) * x.ndim, shapes)
    if selector.config.train_encoder:
        axes["encoder"] = selector.encoder.axes
    step = make_step(squared_error(selector), optimizer, TrainingConfig(seed=config.seed))
    abstract_batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    return lay_out(selector, mesh, axes, init, config.seed, step, abstract_batch, config.batch_size)


def train_selector(
    selector: Selector,
    encoder: Params,
    inputs: SelectorInputs,
    config: SelectorTrainingConfig,
    pairs: pd.DataFrame,
    documents: Documents,
    vocabulary: Vocabulary,
    workdir: Path,
    trained_on: Mapping[str, Any],
    mesh: Mesh,
) -> int:
    """Trains until `num_steps`, resuming from the folder's newest checkpoint.

    Args:
      encoder: parameters of the pretrained decoder with which training begins, on the mesh.
      inputs: what the selector reads.
      pairs: scored places of the documents (`pairs`), which are of one split.
      vocabulary: kept in the folder.
      workdir: see `checkpoint`; made if needed.
      trained_on: kept facts about the origin of the pairs; a run is resumed only with the same.
      mesh: the devices, which share the pairs of a batch.

    Returns:
      The exit status: 0, or `preemption.EXIT_STATUS` after SIGTERM or Ctrl-C with everything saved.

    Raises:
      UserError: the folder holds another selector's training, there are too few documents, or the loss is not finite.
    """
    metadata = selector_metadata(selector, inputs, vocabulary) | {"trained_on": dict(trained_on)}
    _begin(workdir, metadata | {"training": to_plain(config)}, vocabulary)
    train_pairs, validation_pairs = parts = held_out(pairs, config.validation_every, config.validation_pairs)
    feeds, standard = _feeds(selector, encoder, DocumentTexts(inputs, documents), parts, workdir, config)
    reader = PairsReader(train_pairs["score"].to_numpy(), feeds[0], config.batch_size, config.seed)
    program = make_program(selector, config, reader.batch(0, range(config.batch_size)), mesh)
    with Checkpoints(workdir / "checkpoints", keep_last=config.checkpoints_kept) as checkpoints:
        state = _starting_state(program, encoder, standard, checkpoints)
        start = int(state.step)
        if start >= config.num_steps:
            print(f"{workdir} is at step {start} of {config.num_steps}: nothing left to do; raise num_steps to resume")
            return 0
        with (
            open_session(workdir, checkpoints, start, config.num_steps) as session,
            load_batches(reader, lane_sharding(mesh, config.batch_size), start) as batches,
        ):
            writer = session.writer
            writer.say(
                f"{label(selector.config.name, inputs.leaks_the_future)}: {len(train_pairs):,} pairs to train on, "
                f"{len(validation_pairs):,} held out, from step {start:,} to {config.num_steps:,}"
            )

            def save(step: int, state: TrainState) -> None:
                if step not in checkpoints.steps():
                    checkpoints.save(step, state, metadata | {"step": step})

            validation = Validation(
                selector, inputs, config, validation_pairs, feeds[1], mesh, writer, workdir / "best", metadata
            )
            loop = Loop(
                num_steps=config.num_steps,
                log_every=config.log_every,
                report=Report(config, writer, inputs.leaks_the_future),
                # Both are called after the last step in any case.
                hooks=[
                    Hook(config.evaluate_every or config.num_steps, validation),
                    Hook(config.checkpoint_every or config.num_steps, save),
                ],
                outside_of_training=nullcontext,
                save=save,
                session=session,
            )
            _, stopped = loop.run(program.compile_step(), state, batches, start, config.num_steps)
    return EXIT_STATUS if stopped else 0


def _begin(workdir: Path, metadata: dict[str, Any], vocabulary: Vocabulary) -> None:
    """Writes `selector.json`, or compares it with the file that is there."""
    path = workdir / FILE_NAME
    if path.exists():
        check_same(workdir, read_metadata(workdir), metadata, MAY_CHANGE)
    workdir.mkdir(parents=True, exist_ok=True)
    save_vocabulary(vocabulary, workdir)
    write_json(path, metadata)


def _feeds(
    selector: Selector,
    encoder: Params,
    texts: DocumentTexts,
    parts: tuple[pd.DataFrame, pd.DataFrame],
    workdir: Path,
    config: SelectorTrainingConfig,
) -> tuple[list[Feed], Params]:
    """What the selector reads of the pairs for training and for validation, and the moments of fixed vectors."""

    def read(pairs: pd.DataFrame) -> Feed:
        return lambda rows: {part: texts(part, pairs.iloc[rows]) for part in selector.parts}

    if selector.config.train_encoder:
        return list(map(read, parts)), {}
    save_encoder(workdir, encoder)
    vectors = []
    for name, pairs in zip(("train", "validation"), parts, strict=True):
        arguments = selector, encoder, pairs, texts, workdir / "vectors" / name, config.encode_batch
        vectors.append(with_progress(f"texts for {name}", functools.partial(encode_places, *arguments)))
    standard = {part: moments(values) for part, values in vectors[0].values.items()}
    return [each.take for each in vectors], standard | {"scores": moments(parts[0]["score"].to_numpy())}


def _starting_state(program: Program, encoder: Params, standard: Params, checkpoints: Checkpoints) -> TrainState:
    """The state of the newest checkpoint, or a fresh one with the pretrained encoder and the moments of its vectors."""
    abstract = program.abstract_state
    if checkpoints.steps():
        return checkpoints.restore(abstract)[0]
    state = program.initialise()
    given = {"standard": standard} if standard else {}
    if "encoder" in state.params:
        # The first step reuses the memory of the state.
        given["encoder"] = jax.tree.map(jnp.copy, encoder)
    placed = {
        name: jax.tree.map(lambda x, shape: jax.device_put(x, shape.sharding), tree, abstract.params[name])
        for name, tree in given.items()
    }
    return state._replace(params={**state.params, **placed})


class Report:
    """Logs the averages of the steps since the last log."""

    def __init__(self, config: SelectorTrainingConfig, writer: MetricsWriter, leaks: bool):
        self._config, self._writer, self._leaks = config, writer, leaks
        self._gathered: list[StepMetrics] = []

    def __call__(self, step: int, metrics: StepMetrics, state: TrainState) -> None:
        """
        Raises:
          UserError: the loss or the update of the step is not finite.
        """
        metrics = jax.device_get(metrics)
        self._gathered.append(metrics)
        if not metrics.finite:
            raise UserError(
                f"the loss or the update of step {step} is not finite; the checkpoints before are kept: try a smaller "
                "learning rate, such as Adam.base_rate"
            )
        if step % self._config.log_every == 0 or step == self._config.num_steps:
            names = ("loss", "gradient_norm", "update_norm")
            figures = {name: float(np.mean([getattr(each, name) for each in self._gathered])) for name in names}
            rate = {"learning_rate": self._config.optimizer.base_rate}
            self._writer.write(step, figures | rate, kind=label("train", self._leaks))
            self._writer.show(step, label(f"loss {figures['loss']:.4f}", self._leaks))
            self._gathered = []


class Validation:
    """Logs how well the scores of the pairs that are held out are predicted, and keeps the best parameters."""

    def __init__(
        self,
        selector: Selector,
        inputs: SelectorInputs,
        config: SelectorTrainingConfig,
        pairs: pd.DataFrame,
        feed: Feed,
        mesh: Mesh,
        writer: MetricsWriter,
        best: Path,
        metadata: Mapping[str, Any],
    ):
        """`feed`: what the selector reads of these pairs; `best`: folder of the best parameters, with the metadata."""
        self._inputs, self._pairs, self._feed, self._mesh, self._writer = inputs, pairs, feed, mesh, writer
        self._best, self._metadata = best, metadata
        shards = mesh.shape["data"] * mesh.shape["fsdp"]
        self._batch = -(-min(config.encode_batch, len(pairs)) // shards) * shards
        self._predict = jax.jit(functools.partial(predict, selector))

    def __call__(self, step: int, state: TrainState) -> None:
        predicted, lanes, total = [], lane_sharding(self._mesh, self._batch), len(self._pairs)
        with jax.set_mesh(self._mesh):
            for start in range(0, total, self._batch):
                # The last batch is filled up with the first pairs, so that one program serves all batches.
                rows = np.arange(start, start + self._batch) % total
                predicted.append(np.asarray(self._predict(state.params, jax.device_put(self._feed(rows), lanes))))
        values = np.concatenate(predicted)[:total].astype(np.float64)
        figures = agreement(values, self._pairs, self._inputs.history.num_spans)
        kind = label("validation", self._inputs.leaks_the_future)
        self._writer.write(step, figures, kind=kind)
        self._writer.say(
            f"step {step}: {kind} loss {figures['loss']:.4f}, correlation {figures['correlation']:.3f}; a chosen span "
            f"is worth {figures['chosen_gain']:+.3f} nats, a random one {figures['random_gain']:+.3f}, the best ones "
            f"{figures['oracle_gain']:+.3f}"
        )
        kept = {**self._metadata, "step": step, "validation": figures}
        keep_best(self._best, step, state, kept, lambda kept: kept["validation"]["loss"])
