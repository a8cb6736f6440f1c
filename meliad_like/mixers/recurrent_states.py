"""Recurrent states: vectors that each block of tokens reads and updates (Block-Recurrent Transformers).

A token attends to the window and to the states from before its block (section 3.1, vertical); the states attend to the
block and to themselves, and pass a gate (horizontal). Only the states' side is inside the scan over blocks. The tokens'
side is computed for all blocks at once, before the scan (keys and values) and after it (attention to the states).
With block feedback (appendix E) the tokens of other layers read the states too (`StateReader`).
"""

from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float

from meliad_like.errors import UserError
from meliad_like.kernels.registry import KERNELS, kernel_of_states
from meliad_like.kernels.states_tpu import ProjectedKeys
from meliad_like.layers.attention import KeysAndValues, attend_unit, merge_heads, split_heads, unit, unit_query
from meliad_like.layers.backend import unrolls_blocks
from meliad_like.layers.basic import FeedForward, Linear, RMSNorm, parameter, rematerialise_iteration, row_major, rows
from meliad_like.layers.flops import Flops
from meliad_like.layers.lanes import at_lanes
from meliad_like.layers.sharding import constrain, num_parts, scan_in_order
from meliad_like.mixers.base import MIXERS, DecoderShape, Mixer, MixerConfig, Traits
from meliad_like.mixers.sliding_window import TokenCache, WindowAttention, WindowInputs, tokens_of, window_traits
from meliad_like.registry import size
from meliad_like.validation import check_choices, check_positive

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
        self.bias = parameter(rngs.params(), bias, (model_width,), ("model",), "bias")

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
    """Updates the states of a layer by one block of tokens: they attend to it and pass gates (sections 3.2 to 3.4).

    The three cells differ in where the feed-forward network and the gates stand (section 3.3):
    `skip` has one gate and no network, `single` puts the network alone behind the attention, `dual` has a gate after
    the attention and another after the network, as the two residual connections of a transformer layer.
    """

    def __init__(self, config: "RecurrentStates", shape: DecoderShape, *, rngs: nnx.Rngs):
        self.num_heads, self.cell = shape.num_heads, config.cell
        self.kernel = kernel_of_states(shape.attention_kernel, config.num_states, shape.head_size)
        num_states, d, f, inner = config.num_states, shape.model_width, shape.feedforward_width, shape.inner_width
        normal = jax.nn.initializers.normal
        self.initial = parameter(rngs.params(), normal(0.1), (num_states, d), ("states", "model"), "table")
        self.identity = parameter(rngs.params(), normal(1.0), (num_states, d), ("states", "model"), "table")
        self.norm = RMSNorm(d, rngs=rngs)
        self.key, self.value, self.query, self.cross_query = (
            Linear(d, inner, ("model", "heads"), rngs=rngs) for _ in range(4)
        )
        scale = jax.nn.initializers.constant(config.attention_scale)
        self.attention_scale, self.cross_attention_scale = (
            parameter(rngs.params(), scale, (self.num_heads,), ("heads",), "scale") for _ in range(2)
        )
        gate_class = {"fixed": FixedGate, "lstm": LstmGate}[config.gate]
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
        """The next states, through the gates. Returns them, and the input of each gate by its name. `mixed` is the
        result of the states' attention (`attend`)."""
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


class StatesCarry(NamedTuple):
    """The carry of a layer with states; the last two fields are set only while decoding."""

    window: TokenCache
    states: Float[Array, "b r d"]
    heads: StateHeads | None = None
    """The projections of the states, which stay the same for a block."""
    previous: KeysAndValues | None = None
    """The block before, which the ring of the window's cache overwrites."""


class StateAttention(nnx.Module):
    """Attention of a layer's tokens to states."""

    def __init__(self, shape: DecoderShape, attention_scale: float, *, rngs: nnx.Rngs):
        self.num_heads = shape.num_heads
        self.attention_kernel = shape.attention_kernel
        self.query = Linear(shape.model_width, shape.inner_width, ("model", "heads"), rngs=rngs)
        scale = jax.nn.initializers.constant(attention_scale)
        self.attention_scale = parameter(rngs.params(), scale, (shape.num_heads,), ("heads",), "scale")

    def __call__(self, x: Float[Array, "b n d"], keys: KeysAndValues | ProjectedKeys) -> Float[Array, "*batch h t k"]:
        """The results by head; separately for each block if the states' keys have a block axis."""
        query = self.query(x)
        if isinstance(keys, ProjectedKeys):
            if keys.key.ndim == 4:
                query = rearrange(query, "b (c w) i -> b c w i", c=keys.key.shape[1])
            kernel = KERNELS[self.attention_kernel].attend_states
            assert kernel is not None
            return split_heads(kernel(query, jnp.abs(self.attention_scale[...]), keys), self.num_heads)
        query = unit_query(split_heads(query, self.num_heads), self.attention_scale)
        if keys.key.ndim == 5:
            query = rearrange(query, "b h (c w) k -> b c h w k", c=keys.key.shape[1])
        return attend_unit(query, keys)

    @staticmethod
    def flops(shape: DecoderShape, num_states: int) -> Flops:
        return Flops.of_products(2 * shape.model_width * shape.inner_width + 2 * 2 * num_states * shape.inner_width)


class StateRecurrence(Mixer):
    """Tokens attend to the window and to the layer's states, which are updated after every block."""

    def __init__(self, config: "RecurrentStates", shape: DecoderShape, *, rngs: nnx.Rngs):
        self.shape = shape
        self.window = WindowAttention(shape, rngs=rngs)
        self.reader = StateAttention(shape, config.attention_scale, rngs=rngs)
        self.cell = StateCell(config, shape, rngs=rngs)

    def init_carry(self, b, dtype):
        return StatesCarry(self.window.init_carry(b, dtype), self.cell.initial_states(b, dtype))

    def __call__(self, x, context, carry, dropout_key):
        window, inputs, cache = self.window.attend(x, context, carry.window, dropout_key)
        states, keys = self._scan(carry.states, context.start, self._blocks(inputs))
        return tokens_of(window, self.reader(x, keys)), StatesCarry(cache, states)

    def begin(
        self, states: Float[Array, "b r d"], start: Bool[Array, " b"]
    ) -> tuple[Array, StateHeads | ProjectedStates]:
        """The states before a block, and their projections."""
        states = jnp.where(start[:, None, None], self.cell.initial_states(states.shape[0], states.dtype), states)
        return states, self.cell.heads(states) if self.cell.kernel is None else self.cell.projected(states)

    def _blocks(self, inputs: WindowInputs) -> tuple:
        """The keys and values that states attend to, of the block before each block and of the block, [c, b, ...]."""
        if self.cell.kernel is not None:
            return self.window.heads.projected_keys(inputs)
        tokens, c = (inputs.before, inputs.block), inputs.positions.shape[1]
        if 1 < c and unrolls_blocks(c):
            tokens = jax.tree.map(row_major, tokens)
        return jax.tree.map(lambda y: jnp.moveaxis(y, 1, 0), tokens)

    def _scan(self, states: Float[Array, "b r d"], start: Bool[Array, "b c"], blocks: tuple):
        """Runs the states over the blocks, and resets them where a document starts. Returns the last states, and keys
        and values before each block."""

        def step(states, block):
            start, tokens = block
            states, heads = self.begin(states, start)
            return self.cell.update(states, self.cell.attend(heads, *tokens))[0], heads.keys

        blocks = start.T, blocks
        if start.shape[1] == num_parts() == 1:
            # Without a loop, the compiler finds the projections that `publish` has computed already.
            states, keys = step(states, jax.tree.map(lambda y: y[0], blocks))
            return states, jax.tree.map(lambda y: y[:, None], keys)
        unroll = unrolls_blocks(start.shape[1])
        if not unroll:
            step = rematerialise_iteration(step)
        states, keys = scan_in_order(lambda states: jax.lax.scan(step, states, blocks, unroll=unroll), states)
        return states, jax.tree.map(lambda y: jnp.moveaxis(y, 0, 1), keys)

    def publish(self, carry: StatesCarry, start: Bool[Array, " b"]) -> KeysAndValues | ProjectedKeys:
        """The keys and values that layers with a `StateReader` read before a block (`MixerConfig.reads`)."""
        return (carry.heads or self.begin(carry.states, start)[1]).keys

    def begin_decoding(self, carry):
        visible = (carry.window.position > 0) | (not self.shape.mask_empty_cache)
        previous = KeysAndValues(carry.window.key, carry.window.value, visible)
        window = self.window.begin_decoding(carry.window)
        return StatesCarry(window, carry.states, self.cell.heads(carry.states), previous)

    def decode(self, x, counts, context, carry):
        window, _, cache = self.window.attend_tokens(x, counts, carry.window)
        mixed, carry = merge_heads(window, self.reader(x, carry.heads.keys)), carry._replace(window=cache)
        return at_lanes(context.block_ends(counts, self.shape.window_length), self._end_block, mixed, carry)

    def _end_block(self, carry: StatesCarry) -> StatesCarry:
        block = KeysAndValues(carry.window.key, carry.window.value)
        states, _ = self.cell.update(carry.states, self.cell.attend(carry.heads, carry.previous, block))
        return self.begin_decoding(StatesCarry(carry.window, states))


@MIXERS.register("recurrent_states")
class RecurrentStates(MixerConfig):
    """The recurrent layers of a Block-Recurrent Transformer, with their attention to the window."""

    num_states: int = size(512, "length")
    """The number of state vectors of a layer."""
    gate: Literal["fixed", "lstm"] = "fixed"
    """`fixed`: a learned moving average. `lstm`: forget and input gates computed from the states' attention."""
    cell: Literal["skip", "single", "dual"] = "skip"
    """The positions of the feed-forward network and the gates in the cell (section 3.3; `StateCell`)."""
    attention_scale: float = 1.0
    """The scale of all attention to and of states at the start of training (section 3.1: learned, from 1)."""

    time_constants: TimeConstants = None
    """The shortest and longest number of blocks after which a gate keeps 1/e of a state, at the start of training: the
    channels are spread between them, evenly on a logarithmic scale. None: all begin with about 1.4 (`gate="fixed"`) or
    3.2 (`"lstm"`), as in the paper's code."""

    has_window: ClassVar[bool] = True

    def __post_init__(self):
        check_choices(self)
        check_positive(self, ("num_states", "attention_scale"))
        if self.time_constants and min(self.time_constants) <= 0:
            raise UserError(f"RecurrentStates.time_constants={self.time_constants} must be above 0")

    def build(self, shape, *, rngs):
        return StateRecurrence(self, shape, rngs=rngs)

    def width(self, shape):
        return 2 * shape.inner_width

    def flops(self, shape):
        """The operations of a token that attends to the window and to states, and its share of the states' update."""
        update = Flops.of_products(self._update_flops(shape) / shape.window_length)
        return WindowAttention.flops(shape) + StateAttention.flops(shape, self.num_states) + update

    def _update_flops(self, shape: DecoderShape) -> int:
        """The operations of the update of all states of a layer by one block."""
        d, inner, r, f = shape.model_width, shape.inner_width, self.num_states, shape.feedforward_width
        mixed = 2 * inner
        flops = 2 * r * d * 4 * inner
        flops += 2 * 2 * r * (r + 2 * shape.window_length) * inner
        num_gate_products = 2 if self.gate == "lstm" else 0
        if self.cell in ("skip", "dual"):
            flops += (1 + num_gate_products) * 2 * r * mixed * d
        if self.cell in ("single", "dual"):
            size_in = mixed if self.cell == "single" else d
            flops += 2 * r * size_in * f + (1 + num_gate_products) * 2 * r * f * d
        return flops

    def traits(self, shape):
        return window_traits(shape)._replace(states=("states",))

    def has_kernel(self, shape, kind):
        sizes = self.num_states, shape.head_size
        return kind == "attention" and kernel_of_states(shape.attention_kernel, *sizes) is not None


class FeedbackReader(Mixer):
    """Tokens attend to the states that another layer publishes before their block."""

    def __init__(self, config: "StateReader", shape: DecoderShape, *, rngs: nnx.Rngs):
        self.reader = StateAttention(shape, config.attention_scale, rngs=rngs)

    def init_carry(self, b, dtype):
        return ()

    def __call__(self, x, context, carry, dropout_key):
        return tokens_of(self.reader(x, context.published["recurrent_states"])), carry

    def decode(self, x, counts, context, carry):
        return merge_heads(self.reader(x, context.published["recurrent_states"])), carry


@MIXERS.register("state_reader")
class StateReader(MixerConfig):
    """Block feedback (appendix E): layers without states read those of the last layer with `RecurrentStates`."""

    attention_scale: float = 1.0
    """The scale of the attention to states at the start of training."""

    reads: ClassVar[str | None] = "recurrent_states"

    def __post_init__(self):
        check_positive(self, ("attention_scale",))

    def build(self, shape, *, rngs):
        return FeedbackReader(self, shape, rngs=rngs)

    def flops(self, shape):
        published = (mixer for layer in shape.layers for mixer in layer if isinstance(mixer, RecurrentStates))
        return StateAttention.flops(shape, next(published).num_states)

    def traits(self, shape):
        return Traits(sequential_because="with StateReader a block waits for the layers of the one before")
