"""The protocol of mixers: a frozen config that describes a mixer, and the module that it builds.

A *mixer* is one way in which the tokens of a layer see earlier tokens: attention to a window, recurrent states, a
linear recurrence. It owns its projections, its norms and its *carry*, which is all that it remembers of a document. A
layer is

    x = x + output(concatenate(mixer(norm(x)) for mixer in mixers))
    x = x + feedforward(norm(x))

and has nothing that its mixers don't bring (`models/decoder.py`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from meliad_like.errors import UserError
from meliad_like.layers.feedforward import FeedForwardConfig
from meliad_like.layers.flops import Flops
from meliad_like.layers.sharding import own_blocks
from meliad_like.mixers.positions import PositionConfig
from meliad_like.registry import Registry

MIXERS = Registry("mixer")

KernelKind = Literal["attention", "recurrence"]
Carry = Any
"""The carry of a mixer: a pytree of arrays with the lane axis first. Arrays with four axes, [b, h, ...], have heads."""


@dataclasses.dataclass(frozen=True)
class DecoderShape:
    """The sizes of a decoder, the settings of its attention, and the mixers and networks of its layers."""

    model_width: int
    num_heads: int
    head_size: int
    feedforward_width: int
    feedforward_bias: bool
    norm_epsilon: float
    window_length: int
    dropout_rate: float
    mask_empty_cache: bool
    attention_kernel: str
    recurrence_kernel: str
    position: PositionConfig
    layers: tuple[tuple["MixerConfig", ...], ...]
    """The configs of the mixers of each layer."""
    feedforwards: tuple[FeedForwardConfig | None, ...]
    """The config of the feed-forward network of each layer; None: it has none."""

    @classmethod
    def of(cls, config: Any, **derived: Any) -> "DecoderShape":
        """The sizes of a decoder, with values for the fields that its config does not have."""
        same = (field.name for field in dataclasses.fields(cls) if field.name not in derived)
        return cls(**derived, **{name: getattr(config, name) for name in same})

    @property
    def inner_width(self) -> int:
        """The width of all heads together."""
        return self.num_heads * self.head_size

    @property
    def has_kernel(self) -> bool:
        """Whether a kernel computes attention; `auto` is none until a program has chosen one."""
        return self.attention_kernel not in ("auto", "none")


class LayerContext(NamedTuple):
    """The positions of the tokens that a layer reads, and the values that other layers publish for them."""

    positions: Int[Array, "b c"] | Int[Array, " b"]
    """The number of tokens of the document before each block of the whole segment; while decoding, before the first
    token. Do not use it as the length of a memory, because interventions move memories between positions: keep a
    counter in the carry, and call `count`."""
    published: dict[str, Any]
    """The values that mixers publish before each block (`MixerConfig.reads`), by the name of the mixer. Arrays have the
    axes `b` and `c` first; while decoding `b`."""
    longest: int | None = None
    """While decoding, a number of tokens that no document exceeds with those that are read, so that attention can leave
    out what is empty; None: unknown. Lanes whose results and carries nobody uses may exceed it."""

    @property
    def start(self) -> Bool[Array, "b c"]:
        """The blocks of this device with which a document begins."""
        return own_blocks(self.positions) == 0

    def block_ends(self, counts: Int[Array, " b"], window_length: int) -> Bool[Array, " b"]:
        """The lanes whose block ends with the last of `counts` tokens that are decoded."""
        return (counts > 0) & ((self.positions + counts) % window_length == 0)

    def count(self, read: Int[Array, " b"], window_length: int) -> tuple[Int[Array, "b c"], Int[Array, " b"]]:
        """The number of tokens of the document before each block of this device, and after the segment. `read` is the
        number of tokens of the document that a mixer has read before the segment."""
        before, after = count_by_block(read, self.positions == 0, window_length)
        return own_blocks(before), after


def count_by_block(
    read: Int[Array, " b"], start: Bool[Array, "b c"], block_length: int
) -> tuple[Int[Array, "b c"], Int[Array, " b"]]:
    """The number of tokens of the document before each block, and after the last one. `read` are those before the
    segment, and `start` the blocks with which a document begins."""
    block = jnp.arange(start.shape[1])
    last_start = jax.lax.cummax(jnp.where(start, block, -1), axis=1)
    before = jnp.where(last_start >= 0, (block - last_start) * block_length, read[:, None] + block * block_length)
    return before, before[:, -1] + block_length


class Mixer(nnx.Module):
    """One way in which a layer sees earlier tokens.

    While decoding, a mixer's carry may have another form, with arrays that only decoding needs, in fields that are None
    in `init_carry`; `begin_decoding` makes it at the beginning of a block. Other mixers need not implement that.
    """

    def init_carry(self, b: int, dtype: Any) -> Carry:
        """The carry of `b` lanes before their first token; `dtype` is the dtype of the activations."""
        raise NotImplementedError

    def __call__(
        self, x: Float[Array, "b n d"], context: LayerContext, carry: Carry, dropout_key: PRNGKeyArray | None
    ) -> tuple[Float[Array, "b n i"], Carry]:
        """The results for the tokens of a segment, and the carry after it.

        Args:
            x: the layer's input, after its norm.
            context: where documents begin, and what other layers publish.
            carry: the carry after the segment before.
            dropout_key: random key in training; None: no dropout.
        """
        raise NotImplementedError

    def decode(
        self, x: Float[Array, "b n d"], counts: Int[Array, " b"], context: LayerContext, carry: Carry
    ) -> tuple[Float[Array, "b n i"], Carry]:
        """The results for the next tokens of each lane's block, and the carry after the first `counts` of them, in its
        form for decoding; results after these have no meaning, and may be NaN. To write, `n` and `counts` are 1.

        The cost does not depend on the length of the document. Documents begin with a fresh carry, so nothing has to be
        reset. Where the carry changes once per block, it does so with a block's last token (`layers.lanes.at_lanes`).
        """
        raise NotImplementedError

    def begin_decoding(self, carry: Carry) -> Carry:
        """The carry's form for decoding, at the beginning of a block."""
        return carry


class Traits(NamedTuple):
    """The properties of a mixer, or of a kind of layer, that the rest of the package asks for."""

    attends_to: Callable[[Int[np.ndarray, "..."]], Int[np.ndarray, "..."]] = np.zeros_like
    """The number of consecutive earlier tokens that a token attends to, by its position in the document. What a search
    selects is not counted."""
    limited_by: str | None = None
    """The setting that limits this number; None: none, or one that also determines parameters."""
    sequential_because: str | None = None
    """The reason why the blocks of a segment can't be sharded over devices (`MeshConfig.sequence`); None: they can."""
    needs_segments: str | None = None
    """The setting by which the carry depends on where segments end, so that the model can't write text; or None."""
    states: tuple[str, ...] = ()
    """The fields of the carry that are states, which pass from block to block. With `DecoderConfig.clear_states` every
    segment begins with an empty carry, except for the window."""
    output_bias: bool = False
    """Whether the output projection of its layers has a bias."""


@dataclasses.dataclass(frozen=True)
class MixerConfig:
    """The config of a mixer. Every field that is a size declares how it scales (`meliad_like/registry.py`)."""

    has_window: ClassVar[bool] = False
    """Whether the mixer attends to the window itself, as one mixer of a layer can."""
    reads: ClassVar[str | None] = None
    """The name of the mixer whose published values it reads: that mixer's `publish(carry, start)`, a pytree with the
    lanes first, from its carry in either form, before each block; `start` are the lanes in which a document begins with
    the block. The last layer with that mixer publishes, and the layers up to it read a block before the next block."""

    def has_kernel(self, shape: DecoderShape, kind: KernelKind) -> bool:
        """Whether the mixer uses a kernel of this kind, other than the window's; programs check it with its module."""
        return False

    def check(self, shape: DecoderShape) -> None:
        """Raises a UserError if a decoder of this shape can't have the mixer."""

    def build(self, shape: DecoderShape, *, rngs: nnx.Rngs) -> Mixer:
        """The module of one layer."""
        raise NotImplementedError

    def width(self, shape: DecoderShape) -> int:
        """The number of channels of its results (`i`)."""
        return shape.inner_width

    def flops(self, shape: DecoderShape) -> Flops:
        """The operations of one token in one layer, without the layer's output projection."""
        raise NotImplementedError(f"{type(self).__name__} has no method flops")

    def traits(self, shape: DecoderShape) -> Traits:
        return Traits()


@functools.cache
def projection_flops(config: MixerConfig, shape: DecoderShape) -> int:
    """The operations of one token in the products with a mixer's matrices."""
    mixer = nnx.eval_shape(lambda: config.build(shape, rngs=nnx.Rngs(0)))
    parameters = (node for _, node in nnx.iter_graph(mixer) if isinstance(node, nnx.Param))
    return 2 * sum(parameter.size for parameter in parameters if parameter.get_metadata("kind") == "matrix")


def check_taps(config: Any, shape: DecoderShape) -> None:
    """Raises a UserError if the convolution of a mixer, `conv_length` tokens long, sees more than the block before."""
    if config.conv_length > shape.window_length + 1:
        name = f"{type(config).__name__}.conv_length"
        raise UserError(f"{name}={config.conv_length} must be at most window_length={shape.window_length} and 1")
