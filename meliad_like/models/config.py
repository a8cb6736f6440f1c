"""Configs of models, with a registry of their kinds.

A kind of model (a *family*) is one frozen config in a file of its own, and the module that it builds, which follows the
contract of docs/design.md. The trainer, the evaluator and the generator name no family.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from flax import nnx
from jaxtyping import Int

from meliad_like.errors import UserError
from meliad_like.layers.flops import Flops
from meliad_like.registry import Registry, bound_fields, bound_values, may_change, resumable, size
from meliad_like.validation import check_choices, check_positive, check_shares

MODELS = Registry("model")

ActivationDtype = Literal["float32", "bfloat16"]
Remat = Literal["none", "dots", "layers"]
Builder = TypeVar("Builder", bound=Callable[..., nnx.Module])


FAR = 2**40
"""A position in a document behind anything that has a limited length."""


class ModelTraits(NamedTuple):
    """The properties of a model that the rest of the package asks for, in addition to its sizes."""

    num_visible: Callable[[Int[np.ndarray, "..."]], Int[np.ndarray, "..."]]
    """The number of tokens, itself included, that a token at each position of a document attends to in a layer."""
    limited_by: str | None = None
    """The setting that limits this number; None: none, or one that also determines parameters."""
    sequential_because: str | None = "its windows are read one after the other"
    """The reason why a segment can't be sharded over devices (`MeshConfig.sequence`); None: it can."""
    needs_segments: str | None = None
    """The setting by which the carry depends on where segments end, so that the model can't write text; or None."""
    memory: str | None = None
    """The name of the memory in a carry, in a family whose layers have one memory; None: none. The carries of a
    decoder's layers have the memories of mixers instead (`studies/interventions.py`)."""
    states: tuple[str, ...] = ()
    """The fields of memories that are states, which pass from block to block."""
    rate_factor: Callable[[str], float] = lambda name: 1.0
    """The factor on the learning rate of the parameters under a first name; 0: they are not trained."""
    flops_by_the_paper: float | None = None
    """The operations of a predicted token as the family's paper counts them; None: it doesn't."""


_MODULES: dict[type, Callable[..., nnx.Module]] = {}


def builds(config_class: type) -> Callable[[Builder], Builder]:
    """A decorator of the class or function that makes the module of a config and a size of the vocabulary."""

    def add(builder: Builder) -> Builder:
        _MODULES[config_class] = builder
        return builder

    return add


def _dropout_rates(config: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(config) if field.name.endswith("dropout_rate")]


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The sizes of a stack of layers, and the properties of a model that the rest of the package asks for."""

    overlap = 0
    """The number of tokens of the block before that a block repeats."""

    num_layers: int = size(12, "layers")
    """The number of layers."""
    model_width: int = size(1024, "width")
    """The width of the hidden vectors (d)."""
    num_heads: int = size(8, "heads")
    """The number of attention heads (h)."""
    head_size: int = size(128, "heads")
    """The size of the keys, queries and values of a head (k)."""
    feedforward_width: int = size(4096, "width")
    """The width of the hidden layer of the feed-forward networks (f)."""
    window_length: int = size(512, "length")
    """The number of tokens in a block (w): documents and segments begin on block boundaries."""
    dropout_rate: float = 0.0
    """The dropout rate of the layers."""
    activation_dtype: ActivationDtype = "float32"
    """The dtype of activations; parameters, softmax and losses are float32."""
    remat: Remat = resumable("none")
    """The part of the forward pass that the backward pass computes again: nothing (`none`), all but matrix products
    (`dots`), or whole layers (`layers`)."""
    scan_layers: bool = resumable(False)
    """Whether consecutive layers of the same form are one `jax.lax.scan`, a smaller program. Decoding is not."""

    def __post_init__(self):
        check_choices(self)
        sizes = ("num_layers", "model_width", "num_heads", "head_size", "feedforward_width", "window_length")
        check_positive(self, sizes)
        check_shares(self, _dropout_rates(self))

    def build(self, vocabulary_size: int, *, rngs: nnx.Rngs) -> nnx.Module:
        """The module, with fresh parameters."""
        return _MODULES[type(self)](self, vocabulary_size, rngs=rngs)

    def on_this_platform(self) -> "ModelConfig":
        """The same model as it is computed on the devices of this program: with the kernels that work there.

        A program calls it once, before it compiles; configs that are saved stay as they are.
        """
        return self

    def flops(self, vocabulary_size: int) -> Flops:
        """The operations of one token in all layers, and of its logits (`layers/flops.py`)."""
        raise NotImplementedError

    def extends(self, other: "ModelConfig") -> bool:
        """Whether training may start from the parameters of a model with the other config."""
        return type(self) is type(other) and not self.determined(other)

    def determined(self, other: Any) -> list[str]:
        """The names of the fields in which another config of this class is that of another model, and not of the same
        one computed otherwise."""
        free = {name for name, field, _ in bound_fields(self) if may_change(field, other, self)}
        free |= {f"{type(self).__name__}.{name}" for name in ("activation_dtype", *_dropout_rates(self))}
        ours, theirs = bound_values(self), bound_values(other)
        return [name for name in ours | theirs if ours.get(name) != theirs.get(name) and name not in free]

    @property
    def total_layers(self) -> int:
        """The number of layers, with those that a config adds to `num_layers`."""
        return self.num_layers

    @property
    def num_block_by_block(self) -> int:
        """The number of layers, from the first one on, that all read a block before the next block. The layers above
        them read the whole segment at once."""
        return 0

    @property
    def traits(self) -> ModelTraits:
        """The properties of the model that the rest of the package asks for."""
        raise NotImplementedError

    def check_sequence(self, segment_length: int, parts: int) -> None:
        """Raises a UserError if such segments can't be sharded over `parts` devices (`MeshConfig.sequence`)."""
        if parts == 1:
            return
        if (reason := self.traits.sequential_because) is not None:
            name = MODELS.name_of(self)
            raise UserError(f"MeshConfig.sequence={parts} must be 1 for this {name} model: {reason}")
        if segment_length % (parts * self.window_length):
            raise UserError(
                f"MeshConfig.sequence={parts} must divide the blocks of a segment: segment_length={segment_length} is "
                f"not a multiple of {parts} x window_length={self.window_length}"
            )

    def for_separate_sequences(self, num_tokens: int) -> "ModelConfig":
        """The config of the same model for reading independent sequences of this number of tokens. A pretrained decoder
        reads each sequence as one window. Other models keep their windows."""
        del num_tokens
        return self
