"""Configs of the optimizers, most of them optax's, and the scale of the gradient that they receive.

The objective is the sum of the losses over the tokens divided by the constant number of positions in a batch (see
`training/step.py`), so its gradient is nearly that of the mean. Adafactor divides the gradient by its own running size,
so a constant factor changes nothing; Adam nearly so (its epsilon). `clip_norm` and `nag` depend on the
factor: if a batch has padding, the step of `nag` is smaller than fairseq's, which divides by the number of targets.
"""

import fnmatch
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from meliad_like.errors import UserError
from meliad_like.layers.basic import Kind
from meliad_like.layers.sharding import constrain
from meliad_like.optimization.averages import with_average
from meliad_like.registry import Registry
from meliad_like.validation import check_above_zero, check_not_negative, check_shares

OPTIMIZERS = Registry("optimizer")
DECAYED: frozenset[Kind] = frozenset({"matrix", "table", "filter"})
"""The kinds of parameters with weight decay."""
SHARES = ("average_decay", "momentum", "first_decay", "second_decay")
"""Fields of optimizers that are at least 0 and below 1."""
NOT_NEGATIVE = ("weight_decay", "decay", "epsilon")
NAMES: dict[Kind, tuple[str, ...]] = {
    "matrix": ("kernel", "projection"),
    "table": ("embedding", "identity", "initial", "positions"),
    "filter": ("filter", "filters"),
    "bias": ("amplitudes", "bias", "bound", "coefficients", "gate", "output", "scores", "table"),
    "scale": ("scale", "skip", "slope"),
    "rate": ("decay", "rate"),
}
"""The last words of the names of each kind of parameter."""


@dataclass(frozen=True)
class OptimizerConfig:
    """The fields of all optimizers, with the reference's defaults."""

    base_rate: float = 1.0
    """Factor on the schedule's learning rate."""
    weight_decay: float = 0.0
    """The share of a parameter that a step removes, times the learning rate. Biases, scales and rates have none."""
    clip_norm: float | None = None
    """Largest norm of the whole gradient (of the loss per position); None: no clipping."""
    average_decay: float = 0.0
    """Decay per step of a running average of the parameters, which evaluation, samples and all readers of checkpoints
    then get in the place of the last parameters; 0: no average."""
    trained: tuple[str, ...] = ("*",)
    """Patterns of the names of the parameters that are trained, such as "layers/*/mixers/*", where * is any text. The
    others stay as they are, and have no optimizer state."""

    def __post_init__(self):
        check_above_zero(self, ("base_rate", "clip_norm"))
        check_not_negative(self, [name for name in NOT_NEGATIVE if hasattr(self, name)])
        check_shares(self, [name for name in SHARES if hasattr(self, name)])

    def transformation(self, rate: optax.Schedule, kinds: Any) -> optax.GradientTransformation:
        """The optimizer at this learning rate, without clipping; `kinds` as in `make_optimizer`."""
        raise NotImplementedError


@OPTIMIZERS.register("adafactor")
class Adafactor(OptimizerConfig):
    """Adafactor, whose steps are also scaled by each parameter's own size. Weight decay is not scaled by the rate."""

    momentum: float = 0.9
    """Decay of the average of the scaled updates; 0: no momentum, and no memory for it."""
    decay: float = 0.8
    """The exponent of the second moment's decay, which is 1 - t ** -decay after t updates."""
    factored_size: int = 128
    """A parameter's second moment is stored as two vectors if its two largest dimensions have at least this size."""

    def transformation(self, rate: optax.Schedule, kinds: Any) -> optax.GradientTransformation:
        def by_size(update, param):
            return update * jnp.maximum(jnp.sqrt(jnp.mean(jnp.square(param))), 1e-3)

        # As optax.adafactor, whose states this chain has as well, except for the scale of the parameters.
        chain = [
            optax.scale_by_factored_rms(decay_rate=self.decay, min_dim_size_to_factor=self.factored_size),
            optax.clip_by_block_rms(1.0),
            optax.scale_by_learning_rate(rate, flip_sign=False),
            # As optax.scale_by_param_block_rms, which can be differentiated and therefore reads a parameter twice.
            optax.stateless(lambda updates, params: jax.tree.map(by_size, updates, params)),
        ]
        if self.momentum:
            chain.append(optax.ema(self.momentum, debias=False))
        if self.weight_decay:
            chain.append(optax.add_decayed_weights(self.weight_decay, mask=functools.partial(decayed, kinds=kinds)))
        return optax.chain(*chain, optax.scale(-1))


@OPTIMIZERS.register("adam")
class Adam(OptimizerConfig):
    """AdamW with the reference's settings."""

    base_rate: float = 0.05
    weight_decay: float = 1e-4
    first_decay: float = 0.9
    """Decay of the first moment."""
    second_decay: float = 0.98
    """Decay of the second moment."""
    epsilon: float = 1e-8
    """The epsilon, which is added to the root of the second moment, by which a step is divided."""

    def transformation(self, rate: optax.Schedule, kinds: Any) -> optax.GradientTransformation:
        return optax.adamw(
            rate,
            self.first_decay,
            self.second_decay,
            self.epsilon,
            weight_decay=self.weight_decay,
            mask=functools.partial(decayed, kinds=kinds),
        )


@OPTIMIZERS.register("adamw")
class AdamW(Adam):
    """AdamW (Loshchilov and Hutter 2019) with settings that are common for language models."""

    weight_decay: float = 0.1
    second_decay: float = 0.95


@OPTIMIZERS.register("muon")
class Muon(AdamW):
    """Muon (Jordan et al. 2024) for the matrices of products, and AdamW for all other parameters. The updates of the
    matrices have the size of AdamW's (Liu et al. 2025, section 2.2), so that both have one rate and one decay."""

    momentum: float = 0.95
    """Decay of the sum of gradients that is made orthogonal."""

    def transformation(self, rate: optax.Schedule, kinds: Any) -> optax.GradientTransformation:
        muon = optax.chain(
            optax.trace(self.momentum, nesterov=True),
            optax.stateless(lambda updates, _: orthogonal(updates)),
            optax.add_decayed_weights(self.weight_decay),
            optax.scale_by_learning_rate(rate),
        )

        by_label = {"muon": muon, "adamw": super().transformation(rate, kinds)}
        label = functools.partial(by_kind, lambda kind: "muon" if kind == "matrix" else "adamw", kinds)
        return optax.partition(by_label, label)


def orthogonal(updates: Any) -> Any:
    """Replaces the singular values of each matrix `[..., m, n]` of a tree by numbers near 0.2 sqrt(max(m, n)).

    Five steps of the quintic Newton-Schulz iteration of Muon map them into 0.7 to 1.2; then the root mean square of the
    entries is about 0.2. Matrices of equal shape are computed together, so that they are compiled once, and are divided
    among the copies of the parameters along `data`.
    """

    def by_iteration(x: Float[Array, "g m n"]) -> Float[Array, "g m n"]:
        x = x / (jnp.linalg.norm(x, axis=(1, 2), keepdims=True) + 1e-7)
        for _ in range(5):
            square = jnp.einsum("gmn,gkn->gmk", x, x)
            x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
        return x

    leaves, structure = jax.tree.flatten(updates)
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, leaf in enumerate(leaves):
        groups.setdefault(leaf.shape[-2:], []).append(i)
    for (m, n), members in groups.items():
        matrices = [leaves[i].reshape(-1, m, n) for i in members]
        stacked = constrain(jnp.concatenate(matrices), "matrices", "any", "any")
        # The smaller side comes first, so that the squares are small.
        result = by_iteration(stacked) if m <= n else by_iteration(stacked.mT).mT
        parts = jnp.split(result * (0.2 * max(m, n) ** 0.5), np.cumsum([len(x) for x in matrices])[:-1])
        for i, part in zip(members, parts, strict=True):
            leaves[i] = part.reshape(leaves[i].shape)
    return jax.tree.unflatten(structure, leaves)


class NesterovState(NamedTuple):
    """The state of `Nesterov`."""

    count: Int[Array, ""]
    """The number of updates so far."""
    velocity: Any
    """The velocity: the last update without the extra term of its own gradient; a tree like the parameters."""


@OPTIMIZERS.register("nag")
class Nesterov(OptimizerConfig):
    """Nesterov's accelerated gradient as in fairseq, whose velocity is scaled with the learning rate."""

    momentum: float = 0.9
    """Decay of the velocity."""

    def transformation(self, rate: optax.Schedule, kinds: Any) -> optax.GradientTransformation:
        """The update m v_t - r_t g, the step from the point that the velocity leads to, with gradient g, momentum m,
        rates r_t, and the velocity v_t = m (r_t / r_{t-1}) v_{t-1} - r_t g (Sutskever et al. 2013, section 2; Bengio et
        al. 2012, equation 7). So a change of the rate also rescales the momentum, which it doesn't in `optax.sgd`.
        """
        momentum = self.momentum

        def init(params):
            return NesterovState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

        def update(gradient, state, params):
            now, before = (jnp.asarray(rate(count)) for count in (state.count, jnp.maximum(state.count - 1, 0)))
            # After a rate of 0 the velocity is 0 as well.
            factor = momentum * jnp.where(before > 0, now / before, 0.0)
            velocity = jax.tree.map(lambda v, g: factor * v - now * g, state.velocity, gradient)
            decay = jax.tree.map(lambda p, has_decay: self.weight_decay * has_decay * p, params, decayed(params, kinds))
            updates = jax.tree.map(lambda v, g, d: momentum * v - now * g - now * d, velocity, gradient, decay)
            return updates, NesterovState(state.count + 1, velocity)

        return optax.GradientTransformation(init, update)  # type: ignore[arg-type]  # its params are optional


def applied_rate(config: OptimizerConfig, schedule: optax.Schedule) -> optax.Schedule:
    """The learning rate that the optimizer applies at a step, for the optimizer and for the logs."""
    return lambda step: config.base_rate * schedule(step)


def make_optimizer(
    config: OptimizerConfig, schedule: optax.Schedule, kinds: Any = None, factors: Mapping[str, float] | None = None
) -> optax.GradientTransformation:
    """The optax transformation; its state has the dtype of the parameters (float32) and its own count of updates. The
    first update uses the schedule's rate of step 0, which with a warmup is 0.

    `kinds`, a tree like the parameters, says what each parameter is (`layers.basic.Kind`), as `Model.kinds` does; None:
    their names say it (`NAMES`). `factors` multiply the updates of the parameters whose path begins with a name; those
    of 0 stay fixed. Without `kinds`, the optimizer's first use raises a UserError if a name doesn't say what it is.
    """
    rate, factors = applied_rate(config, schedule), factors or {}
    if kinds is None and (factors or config.trained != ("*",)):
        raise UserError("which parameters are trained, and at which rates, needs their kinds (Model.kinds)")
    optimizer = config.transformation(rate, kinds)
    if config.clip_norm is not None:
        optimizer = optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer)
    trained = True if kinds is None else trained_parameters(config, kinds, factors)
    if not all(jax.tree.leaves(trained)):
        labels = jax.tree.map(lambda is_trained: "trained" if is_trained else "fixed", trained)
        optimizer = optax.partition({"trained": optimizer, "fixed": optax.set_to_zero()}, labels)
    if factors := {name: factor for name, factor in factors.items() if factor}:

        def scale(updates, _):
            return {name: optax.tree.scale(factors.get(name, 1.0), tree) for name, tree in updates.items()}

        optimizer = optax.chain(optimizer, optax.stateless(scale))
    return with_average(optimizer, config.average_decay, trained) if config.average_decay else optimizer


def trained_parameters(config: OptimizerConfig, kinds: Any, factors: Mapping[str, float]) -> Any:
    """A tree like the parameters that says which are trained; `kinds` and `factors` as in `make_optimizer`.

    Raises a UserError if a pattern of `OptimizerConfig.trained` matches no parameter.
    """
    name_of = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    names = [name_of(path) for path, _ in jax.tree.leaves_with_path(kinds)]
    for pattern in config.trained:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise UserError(f"OptimizerConfig.trained: {pattern!r} matches no parameter, such as {names[-1]}")

    def is_trained(path, _) -> bool:
        name = name_of(path)
        by_name = any(fnmatch.fnmatchcase(name, pattern) for pattern in config.trained)
        return by_name and factors.get(name.partition("/")[0], 1.0) != 0

    return jax.tree.map_with_path(is_trained, kinds)


def decayed(params: Any, kinds: Any = None) -> Any:
    """A mask of the parameters with weight decay; `kinds` as in `make_optimizer`."""
    return by_kind(lambda kind: kind in DECAYED, kinds, params)


def by_kind(function: Callable[[Kind], Any], kinds: Any, params: Any) -> Any:
    """A tree like `params`, of which optax may have masked a part, with the values of a function of kinds."""
    kind_of = _kind_by_name if kinds is None else dict(jax.tree.leaves_with_path(kinds)).__getitem__
    return jax.tree.map_with_path(lambda path, _: function(kind_of(path)), params)


def _kind_by_name(path: tuple[Any, ...]) -> Kind:
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    for kind, words in NAMES.items():
        if re.split("[/_]", name)[-1] in words:
            return kind
    raise UserError(f"the name of parameter {name} doesn't say what it is: give make_optimizer the kinds (Model.kinds)")
