"""Training of a selector: squared error on scored spans (Ancient History Language Models, section 2)."""

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pandas as pd
from jax.sharding import Mesh

from meliad_like.config.run import TrainingConfig
from meliad_like.data.loading import load_batches
from meliad_like.data.readers import label
from meliad_like.data.split import Documents
from meliad_like.errors import UserError
from meliad_like.history.selectors.inputs import (
    PairsBatch,
    PairsReader,
    SelectorInputs,
    Texts,
    agreement,
    document_texts,
    held_out,
)
from meliad_like.history.selectors.model import Params, Selector, score
from meliad_like.history.selectors.scorer import FILE_NAME
from meliad_like.history.settings import SelectorTrainingConfig
from meliad_like.mesh import lane_sharding, lane_shards
from meliad_like.optimization.optimizers import make_optimizer, trained_parameters
from meliad_like.registry import bound_fields, bound_values
from meliad_like.resumable import check_same, read_json, write_json
from meliad_like.run.opening import save_vocabulary
from meliad_like.training.checkpoints import Checkpoints, keep_best
from meliad_like.training.loop import Hook, open_session, run_steps
from meliad_like.training.metrics import MetricsWriter
from meliad_like.training.processes import EXIT_STATUS
from meliad_like.training.program import TrainingProgram, lay_out
from meliad_like.training.step import Objective, StepMetrics, Sums, TrainState, make_step
from meliad_like.vocabularies.base import Vocabulary


def squared_error(selector: Selector) -> Objective:
    """The mean squared error of a batch, in nats squared."""

    def differentiable(params, carry, batch: PairsBatch, dropout_key):
        errors = jnp.square(selector.score(params, *batch.texts, dropout_key) - batch.scores)
        sums = Sums(jnp.sum(errors), jnp.zeros((), jnp.int32), jnp.asarray(len(errors)))
        return sums.loss, (sums, carry, jnp.isfinite(errors))

    return Objective(differentiable, lambda batch: len(batch.scores), lambda params, lanes: {}, lambda batch: 0)


@dataclasses.dataclass
class SelectorTraining:
    """The training of a selector, and all that it needs."""

    selector: Selector
    encoder: Params
    """Parameters of the pretrained decoder with which training begins, on the mesh."""
    inputs: SelectorInputs
    config: SelectorTrainingConfig
    pairs: pd.DataFrame
    """Scored places (`inputs`) in the documents."""
    documents: Documents
    vocabulary: Vocabulary
    workdir: Path
    """See `scorer`; made if needed."""
    trained_on: dict[str, Any]
    """Facts about the origin of the pairs, which are kept; a run is resumed only with the same."""
    mesh: Mesh
    """The devices, which share the pairs of a batch."""

    def __post_init__(self):
        self.leaks = self.inputs.leaks_the_future
        self.metadata = {
            "settings": bound_values(self.inputs.layout.config) | bound_values(self.selector.config),
            "encoder": bound_values(self.selector.encoder_config),
            "vocabulary_size": self.selector.vocabulary_size,
            "vocabulary_fingerprint": self.vocabulary.fingerprint,
            "leaks_the_future": self.leaks,
            "trained_on": self.trained_on,
        }
        """The facts that determine a selector, for `selector.json` and every checkpoint."""

    def run(self) -> int:
        """Trains until `num_steps`, resuming from the folder's newest checkpoint.

        Returns the exit status: 0, or `EXIT_STATUS` after SIGTERM or Ctrl-C with everything saved.
        """
        self._begin()
        config, workdir, last_step = self.config, self.workdir, self.config.num_steps
        train, validation = held_out(self.pairs, config.validation_every)
        texts = document_texts(self.inputs, self.documents)
        reader = PairsReader(train, texts, config.batch_size, config.seed)
        program = self._program(reader.batch(0, range(config.batch_size)))
        with Checkpoints(workdir / "checkpoints", keep_last=config.checkpoints_kept) as checkpoints:
            logged = checkpoints.read_metadata()["logged"] if checkpoints.steps() else None
            state = self._starting_state(program, checkpoints)
            start = int(state.step)
            if start >= last_step:
                print(f"{workdir} is at step {start} of {last_step}: nothing left to do; raise num_steps to resume")
                return 0
            with (
                open_session(workdir, checkpoints, start, last_step, logged=logged) as session,
                load_batches(reader, lane_sharding(self.mesh, config.batch_size), start) as batches,
            ):
                pairs = f"{len(train):,} pairs to train on, {len(validation):,} held out"
                session.writer.say(f"{label('selector', self.leaks)}: {pairs}, from step {start:,} to {last_step:,}")

                def save(step: int, state: TrainState) -> None:
                    if step not in checkpoints.steps():
                        logged = session.writer.keep()
                        checkpoints.save(step, state, self.metadata | {"step": step, "logged": logged})

                evaluate = partial(self.evaluate, validation, texts, session.writer)
                _, stopped = run_steps(
                    session,
                    program.compile_step(),
                    state,
                    batches,
                    start,
                    last_step,
                    num_steps=last_step,
                    log_every=config.log_every,
                    report=partial(self.report, session.writer),
                    # Both are always called after the last step.
                    hooks=[
                        Hook(config.evaluate_every or last_step, evaluate),
                        Hook(config.checkpoint_every or last_step, save),
                    ],
                    save=save,
                )
        return EXIT_STATUS if stopped else 0

    def _begin(self) -> None:
        """Writes `selector.json`, or compares it with the file that is there."""
        path, metadata = self.workdir / FILE_NAME, self.metadata | {"training": bound_values(self.config)}
        if path.exists():
            fields = bound_fields(self.config)
            may_change = [f"training.{name}" for name, field, _ in fields if "resumable" in field.metadata]
            check_same(self.workdir, read_json(path), metadata, may_change)
        save_vocabulary(self.vocabulary, self.workdir)
        write_json(path, metadata)

    def _program(self, batch: PairsBatch) -> TrainingProgram:
        """The selector and its step on the mesh."""
        selector, config, shards = self.selector, self.config, lane_shards(self.mesh)
        if config.batch_size % shards:
            problem = f"batch_size={config.batch_size} must be a multiple of the {shards} devices that share a batch"
            raise UserError(f"SelectorTrainingConfig.{problem}")
        optimizer = make_optimizer(config.optimizer, optax.constant_schedule(1.0), selector.kinds)

        def init(key) -> TrainState:
            params, count = selector.init(key), jnp.zeros((), jnp.int32)
            return TrainState(count, params, optimizer.init(params), {}, count, jnp.zeros((), bool))

        trained = trained_parameters(config.optimizer, selector.kinds, {})
        step = partial(make_step, squared_error(selector), optimizer, TrainingConfig(seed=config.seed), trained=trained)
        return lay_out(selector, self.mesh, selector.axes, init, config.seed, step, batch, config.batch_size)

    def _starting_state(self, program: TrainingProgram, checkpoints: Checkpoints) -> TrainState:
        """The newest checkpoint, or a fresh state with the pretrained encoder."""
        abstract = program.abstract_state
        if checkpoints.steps():
            return checkpoints.restore(abstract)[0]
        state = program.initialise()
        # The first step reuses the memory of the state, and must not reuse the encoder's.
        shardings = jax.tree.map(lambda x: x.sharding, abstract.params["encoder"])
        encoder = jax.device_put(jax.tree.map(jnp.copy, self.encoder), shardings)
        return state.starting_with({**state.params, "encoder": encoder})

    def report(self, writer: MetricsWriter, step: int, metrics: StepMetrics, state: TrainState) -> None:
        """Logs the averages of the steps since the last log. Raises a UserError if the loss, the gradient or the
        parameters of the step are not finite."""
        metrics = jax.device_get(metrics)
        if not (metrics.finite and np.isfinite(metrics.parameter_norm)):
            problem = f"the loss, the gradient or the parameters of step {step} are not finite"
            way_out = "try a smaller learning rate, such as Adam.base_rate"
            raise UserError(f"{problem}; the checkpoints before are kept: {way_out}")
        writer.unlogged.add(1, {name: getattr(metrics, name) for name in ("loss", "gradient_norm", "update_norm")})
        if step % self.config.log_every == 0 or step == self.config.num_steps:
            figures, _ = writer.unlogged.take()
            rate = {"learning_rate": self.config.optimizer.base_rate}
            writer.write(step, figures | rate, kind=label("train", self.leaks))
            writer.show(step, label(f"loss {figures['loss']:.4f}", self.leaks))

    def evaluate(
        self,
        pairs: pd.DataFrame,
        texts: Callable[[pd.DataFrame], Texts],
        writer: MetricsWriter,
        step: int,
        state: TrainState,
    ) -> None:
        """Logs how well the scores of the pairs that are held out are predicted, and keeps the best parameters."""
        shards = lane_shards(self.mesh)
        size = -(-min(self.config.encode_batch, len(pairs)) // shards) * shards
        predicted, lanes = [], lane_sharding(self.mesh, size)
        with jax.set_mesh(self.mesh):
            for start in range(0, len(pairs), size):
                # The last batch is filled up with the first pairs, so that one program serves all batches.
                rows = np.arange(start, start + size) % len(pairs)
                batch = jax.device_put(texts(pairs.iloc[rows]), lanes)
                predicted.append(np.asarray(score(self.selector, state.params, *batch)))
        values = np.concatenate(predicted)[: len(pairs)].astype(np.float64)
        figures = agreement(values, pairs, self.inputs.layout.config.num_spans)
        kind = label("validation", self.leaks)
        writer.write(step, figures, kind=kind)
        writer.say(
            f"step {step}: {kind} loss {figures['loss']:.4f}, correlation {figures['correlation']:.3f}; a chosen span "
            f"is worth {figures['chosen_gain']:+.3f} nats, a random one {figures['random_gain']:+.3f}, the best ones "
            f"{figures['oracle_gain']:+.3f}"
        )
        details = self.metadata | {"step": step, "validation": figures}
        keep_best(self.workdir / "best", step, state, details, lambda saved: saved["validation"]["loss"])
