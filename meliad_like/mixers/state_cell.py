"""The recurrent cell: states attend to a block of tokens and are updated through gates.

Block-Recurrent Transformers, sections 3.2 to 3.4.
"""

from typing import TYPE_CHECKING, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from meliad_like.layers.attention import KeysAndValues, attend_unit, merge_heads, split_heads, unit, unit_query
from meliad_like.layers.attention_kernel_states import ProjectedKeys
from meliad_like.layers.basic import FeedForward, Linear, RMSNorm, parameter, rows
from meliad_like.layers.kernels import kernel_of_states
from meliad_like.layers.sharding import constrain
from meliad_like.mixers.base import Shape

if TYPE_CHECKING:
    from meliad_like.mixers.recurrent_states import RecurrentStates

GateKind = Literal["fixed", "lstm"]
CellKind = Literal["skip", "single", "dual"]
TimeConstants = tuple[float, float] | None
"""The shortest and longest time constant of gates at the start of training, in blocks; None: as in the paper's code."""


def spread_biases(times: tuple[float, float], width: int) -> Float[Array, " d"]:
    """Biases of gates that keep `exp(-1 / t)` of a state at first, so that 1/e of it is left after `t` blocks.

    `t` is spread evenly over the channels, on a logarithmic scale, as by the chrono initialisation of Tallec and
    Ollivier (2018, arXiv:1804.11188), whose time constants are drawn.
    """
    return -jnp.log(jnp.expm1(1 / jnp.geomspace(*times, width)))


class Gate(nnx.Module):
    """Mixes the states with their update, in float32, because a gate's bias has a gradient that is a long sum."""

    def gates(self, hidden: Float[Array, "*batch f"]) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
        """The share of a state that is kept, and the share of its update that is taken in: [d], or [*batch, d]."""
        raise NotImplementedError

    def __call__(
        self, state: Float[Array, "b r d"], hidden: Float[Array, "b r f"], update: Float[Array, "b r d"]
    ) -> Float[Array, "b r d"]:
        keep, take = (x.astype(jnp.float32) for x in self.gates(rows(hidden)))
        return (keep * rows(state) + take * rows(update)).astype(state.dtype).reshape(state.shape)


class FixedGate(Gate):
    """`g * state + (1 - g) * update` with `g = sigmoid(bias)`: a learned moving average (section 3.2)."""

    def __init__(self, hidden_width: int, model_width: int, hidden_axis: str, times: TimeConstants, *, rngs: nnx.Rngs):
        del hidden_width, hidden_axis  # This gate doesn't depend on its input.
        bias = jax.nn.initializers.normal(0.1)
        if times:
            bias = jax.nn.initializers.constant(spread_biases(times, model_width))
        self.bias = parameter(rngs.params(), bias, (model_width,), ("model",))

    def gates(self, hidden):
        gate = jax.nn.sigmoid(self.bias[...])
        return gate, 1 - gate


class LstmGate(Gate):
    """`f * state + i * update`, with both gates computed from `hidden` and biased to keep the state (section 3.2)."""

    def __init__(self, hidden_width: int, model_width: int, hidden_axis: str, times: TimeConstants, *, rngs: nnx.Rngs):
        small = jax.nn.initializers.variance_scaling(0.1, "fan_in", "truncated_normal")
        forget = input_ = jax.nn.initializers.normal(0.1)
        if times:
            # `gates` adds 1 and -1. What is taken in is at first what is forgotten.
            spread = spread_biases(times, model_width)
            forget, input_ = jax.nn.initializers.constant(spread - 1), jax.nn.initializers.constant(1 - spread)
        size = (hidden_width, model_width, (hidden_axis, "model"))
        self.forget = Linear(*size, rngs=rngs, initializer=small, bias_initializer=forget)
        self.input = Linear(*size, rngs=rngs, initializer=small, bias_initializer=input_)

    def gates(self, hidden):
        return jax.nn.sigmoid(self.forget(hidden) + 1), jax.nn.sigmoid(self.input(hidden) - 1)


GATES = {"fixed": FixedGate, "lstm": LstmGate}


class StateHeads(NamedTuple):
    """The heads of the states before a block, [b, h, r, k] each: keys of unit length, queries by `unit_query`."""

    keys: KeysAndValues
    query: Array
    cross_query: Array


class ProjectedStates(NamedTuple):
    """The projections of the states before a block, [b, r, i] each, for a kernel."""

    keys: ProjectedKeys
    query: Array
    cross_query: Array


class StateCell(nnx.Module):
    """Updates the states of a layer by one block of tokens.

    The three cells differ in where the feed-forward network and the gates stand (section 3.3):
    `skip` has one gate and no network, `single` puts the network alone behind the attention, `dual` has a gate after
    the attention and another after the network, as the two residual connections of a transformer layer.
    """

    def __init__(self, config: "RecurrentStates", shape: Shape, *, rngs: nnx.Rngs):
        self.num_heads, self.cell = shape.num_heads, config.cell
        self.kernel = kernel_of_states(shape.attention_kernel, config.num_states, shape.head_size)
        num_states, d, f, inner = config.num_states, shape.model_width, shape.feedforward_width, shape.inner_width
        normal = jax.nn.initializers.normal
        self.initial = parameter(rngs.params(), normal(0.1), (num_states, d), ("states", "model"))
        self.identity = parameter(rngs.params(), normal(1.0), (num_states, d), ("states", "model"))
        self.norm = RMSNorm(d, rngs=rngs)
        self.key, self.value, self.query, self.cross_query = (
            Linear(d, inner, ("model", "heads"), rngs=rngs) for _ in range(4)
        )
        scale = jax.nn.initializers.constant(config.attention_scale)
        self.attention_scale, self.cross_attention_scale = (
            parameter(rngs.params(), scale, (self.num_heads,), ("heads",)) for _ in range(2)
        )
        gate_class = GATES[config.gate]
        if config.cell in ("skip", "dual"):
            self.output = Linear(2 * inner, d, ("heads", "model"), rngs=rngs)
            self.attention_gate = gate_class(2 * inner, d, "heads", config.time_constants, rngs=rngs)
        if config.cell == "dual":
            self.feedforward_norm = RMSNorm(d, rngs=rngs)
            self.feedforward = FeedForward(d, f, d, rngs=rngs)
        if config.cell == "single":
            self.feedforward = FeedForward(2 * inner, f, d, rngs=rngs)
        if config.cell in ("single", "dual"):
            self.feedforward_gate = gate_class(f, d, "feedforward", config.time_constants, rngs=rngs)

    def gate_values(self, read: dict[str, Float[Array, "b r _"]]) -> dict[str, Float[Array, "2 b r d"]]:
        """For each gate, the share of each channel that it keeps, and the share of the update that it takes in. `read`
        is the input of each gate, as `update` returns it."""
        d = self.initial.shape[1]
        return {
            name: jnp.stack([jnp.broadcast_to(x, (*hidden.shape[:-1], d)) for x in getattr(self, name).gates(hidden)])
            for name, hidden in read.items()
        }

    def initial_states(self, b: int, dtype) -> Float[Array, "b r d"]:
        """The learned states at the start of a document."""
        return jnp.broadcast_to(self.initial[...], (b, *self.initial.shape)).astype(dtype)

    def _project(self, states: Float[Array, "b r d"]) -> list[Float[Array, "b r i"]]:
        """Keys, values and both queries. The state ids are added after the norm, so they reach the values as well."""
        x = (self.norm(states).astype(jnp.float32) + self.identity[...]).astype(states.dtype)
        return [project(x) for project in (self.key, self.value, self.query, self.cross_query)]

    def projected(self, states: Float[Array, "b r d"]) -> ProjectedStates:
        """Projects the states for a kernel."""
        key, value, *queries = self._project(states)
        return ProjectedStates(ProjectedKeys(key, value), *queries)

    def heads(self, states: Float[Array, "b r d"]) -> StateHeads:
        """Projects the states."""
        key, value, query, cross_query = (split_heads(x, self.num_heads) for x in self._project(states))
        return StateHeads(
            keys=KeysAndValues(unit(key), value),
            query=unit_query(query, self.attention_scale),
            cross_query=unit_query(cross_query, self.cross_attention_scale),
        )

    def attend(
        self, heads: StateHeads | ProjectedStates, *tokens: KeysAndValues | ProjectedKeys
    ) -> Float[Array, "b r j"]:
        """Attention of the states to each other, and to the tokens of the block before and of the block."""
        if isinstance(heads, StateHeads):
            return merge_heads(attend_unit(heads.query, heads.keys), attend_unit(heads.cross_query, *tokens))
        assert self.kernel is not None
        scale, cross_scale = jnp.abs(self.attention_scale[...]), jnp.abs(self.cross_attention_scale[...])
        among_states = self.kernel(heads.query, scale, heads.keys)
        return jnp.concatenate([among_states, self.kernel(heads.cross_query, cross_scale, *tokens)], axis=-1)

    def update(
        self, states: Float[Array, "b r d"], mixed: Float[Array, "b r j"]
    ) -> tuple[Float[Array, "b r d"], dict[str, Float[Array, "b r _"]]]:
        """The next states, through the gates. Returns them, and the input of each gate, for `gate_values`. `mixed` is
        the result of the states' attention (`attend`)."""
        inputs = {}
        if self.cell in ("skip", "dual"):
            inputs["attention_gate"] = mixed
            states = self.attention_gate(states, mixed, self.output(mixed))
        if self.cell == "dual":
            inputs["feedforward_gate"] = hidden = jax.nn.relu(self.feedforward.hidden(self.feedforward_norm(states)))
            states = self.feedforward_gate(states, hidden, self.feedforward.output(hidden))
        if self.cell == "single":
            # Heads are sharded along `tensor`, and so is the network's hidden layer. Otherwise the compiler chooses
            # a layout between them whose gradients are wrong, on meshes with all of `data`, `fsdp` and `tensor`.
            hidden = jax.nn.relu(self.feedforward.hidden(constrain(mixed, "lanes", None, None)))
            inputs["feedforward_gate"] = hidden
            states = self.feedforward_gate(states, hidden, jnp.tanh(self.feedforward.output(hidden)))
        return states, inputs
