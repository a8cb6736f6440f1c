"""Training of a selector: squared error on scored spans (Ancient History Language Models, section 2)."""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from meliad_like.data.readers import label
from meliad_like.data.vocabulary import Vocabulary
from meliad_like.errors import UserError
from meliad_like.evaluation.report import with_progress
from meliad_like.history.selectors.checkpoint import (
    FILE_NAME,
    on_one_device,
    read_metadata,
    save_encoder,
    selector_metadata,
)
from meliad_like.history.selectors.config import Part, SelectorTrainingConfig
from meliad_like.history.selectors.inputs import Documents, DocumentTexts, SelectorInputs
from meliad_like.history.selectors.model import Params, Selector
from meliad_like.history.selectors.pairs import (
    Order,
    Pairs,
    Vectors,
    encode_places,
    held_out,
    moments,
    some_strides,
    stride_index,
)
from meliad_like.remote import write_whole
from meliad_like.run.opening import save_vocabulary
from meliad_like.training import preemption
from meliad_like.training.checkpoints import Checkpoints, compare_metadata, keep_best
from meliad_like.training.metrics import MetricsWriter
from meliad_like.training.optimizers import leave_fixed

MAY_CHANGE = tuple(
    f"training.{name}"
    for name in ("num_steps", "log_every", "evaluate_every", "checkpoint_every", "checkpoints_kept", "encode_batch")
)
"""What a run may go on with another value of."""


class SelectorState(NamedTuple):
    """All that training goes on from. Order of the pairs and dropout are functions of seed and step."""

    step: Int[Array, ""]
    params: Params
    optimizer_state: Any


class SelectorMetrics(NamedTuple):
    """Of one step."""

    loss: Float[Array, ""]
    """Mean squared error, nats squared."""
    gradient_norm: Float[Array, ""]
    update_norm: Float[Array, ""]


Inputs = dict[Part, Any]
"""Of each part: vectors, or `Texts` where the encoder is trained."""


def make_optimizer(config: SelectorTrainingConfig, selector: Selector) -> optax.GradientTransformation:
    """AdamW for all that is trained."""
    adam = optax.adamw(
        config.learning_rate, config.first_decay, config.second_decay, config.epsilon, weight_decay=config.weight_decay
    )
    return leave_fixed(adam, selector.fixed_parameters)


def make_train_step(
    selector: Selector, optimizer: optax.GradientTransformation, config: SelectorTrainingConfig
) -> Callable[[SelectorState, Inputs, Float[Array, " b"]], tuple[SelectorState, SelectorMetrics]]:
    """One step as a function to be jitted: (state, inputs, scores) -> (state, metrics)."""
    key = jax.random.key(config.seed)

    def loss(params: Params, inputs: Inputs, scores, dropout_key):
        return jnp.mean(jnp.square(predict(selector, params, inputs, dropout_key) - scores))

    def train_step(state: SelectorState, inputs: Inputs, scores):
        dropout_key = jax.random.fold_in(key, state.step)
        error, gradient = jax.value_and_grad(loss)(state.params, inputs, scores, dropout_key)
        updates, optimizer_state = optimizer.update(gradient, state.optimizer_state, state.params)
        new_state = SelectorState(state.step + 1, optax.apply_updates(state.params, updates), optimizer_state)
        return new_state, SelectorMetrics(error, optax.tree.norm(gradient), optax.tree.norm(updates))

    return train_step


def predict(selector: Selector, params: Params, inputs: Inputs, dropout_key=None) -> Float[Array, " b"]:
    """Scores of a batch."""
    if selector.config.train_encoder:
        keys = {
            part: None if dropout_key is None else jax.random.fold_in(dropout_key, i) for i, part in enumerate(inputs)
        }
        inputs = {
            part: selector.encode(params["encoder"], tokens, length, keys[part])
            for part, (tokens, length) in inputs.items()
        }
    return selector.score_vectors(params, inputs)


def agreement(predicted: Float[np.ndarray, " n"], pairs: Pairs, num_spans: int) -> dict[str, float]:
    """How well predictions fit the scores of some places, and what choosing by them is worth.

    Args:
      predicted: of the pairs.
      pairs: with the true scores.
      num_spans: that are chosen of each stride.

    Returns:
      `loss`: the mean squared error. `correlation` with the scores. And the mean score, over strides, of the spans that
      would be chosen (`chosen_gain`), of the best ones (`oracle_gain`) and of all (`random_gain`), in nats a span.
    """
    scores, stride = pairs.scores.astype(np.float64), stride_index(pairs)
    deviations = predicted.std() * scores.std()
    covariance = np.mean((predicted - predicted.mean()) * (scores - scores.mean()))

    def mean_of_best(values: np.ndarray) -> float:
        order = np.lexsort((-values, stride))
        starts = np.flatnonzero(np.diff(stride[order], prepend=-1))
        rank = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))
        chosen = order[rank < num_spans]
        return float(np.mean(np.bincount(stride[chosen], scores[chosen]) / np.bincount(stride[chosen])))

    return {
        "loss": float(np.mean(np.square(predicted - scores))),
        "correlation": float(covariance / deviations) if deviations else 0.0,
        "chosen_gain": mean_of_best(predicted),
        "oracle_gain": mean_of_best(scores),
        "random_gain": float(np.mean(np.bincount(stride, scores) / np.bincount(stride))),
    }


def train_selector(
    selector: Selector,
    encoder: Params,
    inputs: SelectorInputs,
    config: SelectorTrainingConfig,
    pairs: Pairs,
    documents: Documents,
    vocabulary: Vocabulary,
    workdir: Path,
    trained_on: Mapping[str, Any],
) -> int:
    """Trains until `num_steps`, going on from the folder's newest checkpoint.

    Args:
      selector: what is trained.
      encoder: the pretrained decoder's parameters, which training begins with.
      inputs: what the selector reads.
      config: how.
      pairs: scored places of the documents.
      documents: of one split.
      vocabulary: kept in the folder.
      workdir: see `checkpoint`; made if need be.
      trained_on: what is kept of where the pairs come from; a run goes on with the same alone.

    Returns:
      The exit status: 0, or `preemption.EXIT_STATUS` after SIGTERM or Ctrl-C with everything saved.

    Raises:
      UserError: the folder holds another selector's training, there are too few documents, or the loss is not finite.
    """
    metadata = selector_metadata(selector, inputs, vocabulary) | {"trained_on": dict(trained_on)}
    _begin(workdir, metadata | {"training": dataclasses.asdict(config)}, vocabulary)
    train_pairs, validation_pairs = held_out(pairs, config.validation_every)
    if config.validation_pairs is not None:
        validation_pairs = some_strides(validation_pairs, config.validation_pairs)
    optimizer = make_optimizer(config, selector)
    feed = _make_feed(selector, encoder, inputs, config, (train_pairs, validation_pairs), documents, workdir)
    with Checkpoints(workdir / "checkpoints", keep_last=config.checkpoints_kept) as checkpoints:
        standard = feed.standard and feed.standard | {"scores": moments(train_pairs.scores)}
        state = _starting_state(selector, encoder, optimizer, config, standard, checkpoints)
        start = int(state.step)
        if start >= config.num_steps:
            print(f"{workdir} is at step {start} of {config.num_steps}: nothing left to do; raise num_steps to go on")
            return 0
        step_function = jax.jit(make_train_step(selector, optimizer, config), donate_argnums=0)
        evaluate = _Evaluation(selector, inputs, config, validation_pairs, feed.validation)
        order = Order(len(train_pairs), config.batch_size, config.seed)
        with MetricsWriter(workdir, start, config.num_steps) as writer, preemption.Preemption() as preempted:
            writer.say(
                f"{label(f'{selector.config.kind} selector', inputs.leaks_the_future)}: "
                f"{len(train_pairs):,} pairs to train on, {len(validation_pairs):,} held out, from step {start:,} to "
                f"{config.num_steps:,}"
            )
            metrics: list[SelectorMetrics] = []
            for step in range(start + 1, config.num_steps + 1):
                rows = order.rows(step - 1)
                state, of_step = step_function(state, feed.train(rows), jnp.asarray(train_pairs.scores[rows]))
                metrics.append(of_step)
                last, stop = step == config.num_steps, preempted.reached(step)
                evaluated, saved = (
                    last or (every > 0 and step % every == 0)
                    for every in (config.evaluate_every, config.checkpoint_every)
                )
                if step % config.log_every == 0 or evaluated or saved or stop:
                    # The state is never saved before it is known to be finite.
                    _log(writer, step, metrics, config, inputs.leaks_the_future)
                    metrics = []
                if evaluated:
                    figures = evaluate(state.params)
                    writer.write(step, figures, kind=label("validation", inputs.leaks_the_future))
                    writer.say(_summary(step, figures, inputs.leaks_the_future))
                    kept = {**metadata, "step": step, "validation": figures}
                    keep_best(workdir / "best", step, state, kept, lambda best: best["validation"]["loss"])
                if saved or stop:
                    checkpoints.save(step, state, metadata | {"step": step})
                if stop and not last:
                    checkpoints.wait()
                    writer.say(f"{preempted.signal_name}: saved step {step} in {workdir}; the same command resumes it")
                    return preemption.EXIT_STATUS
    return 0


class _Feed(NamedTuple):
    """Inputs by row."""

    train: Callable[[np.ndarray], Inputs]
    validation: Callable[[np.ndarray], Inputs]
    standard: Params
    """Means and deviations of the vectors; empty where the encoder is trained."""


def _make_feed(
    selector: Selector,
    encoder: Params,
    inputs: SelectorInputs,
    config: SelectorTrainingConfig,
    parts: tuple[Pairs, Pairs],
    documents: Documents,
    workdir: Path,
) -> _Feed:
    texts = DocumentTexts(inputs, documents)
    if selector.config.train_encoder:

        def read(pairs: Pairs) -> Callable[[np.ndarray], Inputs]:
            return lambda rows: {part: tuple(texts(part, pairs.places.take(rows))) for part in selector.parts}

        return _Feed(read(parts[0]), read(parts[1]), {})
    save_encoder(workdir, encoder)
    vectors: list[Vectors] = []
    for name, pairs in zip(("train", "validation"), parts, strict=True):
        folder = workdir / "vectors" / name
        vectors.append(
            with_progress(
                f"texts of {name}",
                lambda told, pairs=pairs, folder=folder: encode_places(
                    selector, encoder, pairs.places, texts, folder, config.encode_batch, told
                ),
            )
        )
    return _Feed(vectors[0].take, vectors[1].take, vectors[0].standard())


def _starting_state(
    selector: Selector,
    encoder: Params,
    optimizer: optax.GradientTransformation,
    config: SelectorTrainingConfig,
    standard: Params,
    checkpoints: Checkpoints,
) -> SelectorState:
    params = selector.init(jax.random.key(config.seed))
    if standard:
        params["standard"] = standard
    if selector.config.train_encoder:
        # The first step takes the memory of what it is given.
        params["encoder"] = jax.tree.map(jnp.copy, encoder)
    state = SelectorState(jnp.zeros((), jnp.int32), params, optimizer.init(params))
    if not checkpoints.steps():
        return state
    return checkpoints.restore(on_one_device(jax.eval_shape(lambda: state)))[0]


def _begin(workdir: Path, metadata: dict[str, Any], vocabulary: Vocabulary) -> None:
    """Writes `selector.json`, or compares it with what is there."""
    path = workdir / FILE_NAME
    if path.exists():
        compare_metadata(workdir, read_metadata(workdir), metadata, MAY_CHANGE)
    workdir.mkdir(parents=True, exist_ok=True)
    save_vocabulary(vocabulary, workdir)
    write_whole(path, json.dumps(metadata, indent=2) + "\n")


class _Evaluation:
    """Predicts the scores of all pairs that are held out."""

    def __init__(
        self,
        selector: Selector,
        inputs: SelectorInputs,
        config: SelectorTrainingConfig,
        pairs: Pairs,
        feed: Callable[[np.ndarray], Inputs],
    ):
        self._pairs, self._feed, self._batch = pairs, feed, min(config.encode_batch, len(pairs))
        self._num_spans = inputs.history.num_spans
        self._predict = jax.jit(lambda params, inputs: predict(selector, params, inputs))

    def __call__(self, params: Params) -> dict[str, float]:
        predicted = []
        for start in range(0, len(self._pairs), self._batch):
            # The last batch is as large as the others, so that one program serves all.
            first = min(start, len(self._pairs) - self._batch)
            rows = np.arange(first, first + self._batch)
            predicted.append(np.asarray(self._predict(params, self._feed(rows)))[start - first :])
        return agreement(np.concatenate(predicted).astype(np.float64), self._pairs, self._num_spans)


def _log(
    writer: MetricsWriter, step: int, metrics: list[SelectorMetrics], config: SelectorTrainingConfig, leaks: bool
) -> None:
    """
    Raises:
      UserError: a loss or an update is not finite.
    """
    columns = SelectorMetrics(*np.asarray(jax.device_get(metrics), np.float64).T)
    figures = {name: float(values.mean()) for name, values in columns._asdict().items()}
    writer.write(step, figures | {"learning_rate": config.learning_rate}, kind=label("train", leaks))
    if not all(map(math.isfinite, figures.values())):
        raise UserError(
            f"the loss or the update of step {step}, or of the {len(metrics) - 1} before it, is not finite; the "
            "checkpoints before are kept: try a smaller SelectorTrainingConfig.learning_rate"
        )
    writer.show(step, label(f"loss {figures['loss']:.4f}", leaks))


def _summary(step: int, figures: Mapping[str, float], leaks: bool) -> str:
    return (
        f"step {step}: {label('validation', leaks)} loss {figures['loss']:.4f}, correlation "
        f"{figures['correlation']:.3f}; a chosen span is worth {figures['chosen_gain']:+.3f} nats, by chance "
        f"{figures['random_gain']:+.3f}, at best {figures['oracle_gain']:+.3f}"
    )
