"""The model families: whose configs a run may have, and what each becomes.

A family is a frozen config dataclass, a module that follows the contract of docs/design.md, and a count of operations.
Everything that knows more than one of them is here; the trainer, the evaluator and the generator know none.
"""

import dataclasses
import operator
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import numpy as np

from meliad_like.errors import UserError
from meliad_like.models.decoder import Decoder, carry_axes
from meliad_like.models.decoder_config import DecoderConfig
from meliad_like.models.pretrained import flops as pretrained_flops
from meliad_like.models.pretrained.config import PretrainedConfig
from meliad_like.models.pretrained.decoder import PretrainedDecoder
from meliad_like.models.shortformer import Shortformer
from meliad_like.models.shortformer import forward_flops_per_token as shortformer_flops_per_token
from meliad_like.models.shortformer_config import DROPOUT_RATES, ShortformerConfig


class ModelConfig(Protocol):
    """What the config of every family has, beside fields of its own. It is hashable, and validated when it is made."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    @property
    def window_length(self) -> int:
        """Tokens in a block (w): documents begin on block boundaries, and a segment is a whole number of blocks."""
        ...

    @property
    def activation_dtype(self) -> str:
        """`float32` or `bfloat16`."""
        ...

    @property
    def needs_segments(self) -> bool:
        """Whether what is remembered depends on where segments end: such a model can be evaluated, but can't write."""
        ...


def same_but_for(*names: str) -> Callable[[Any, ModelConfig], bool]:
    """Whether two configs are of one family and the same in all fields but these."""

    def same(config: Any, other: ModelConfig) -> bool:
        if type(config) is not type(other):
            return False
        return dataclasses.replace(config, **{name: getattr(other, name) for name in names}) == other

    return same


class Family(NamedTuple):
    """One kind of model."""

    config: type[ModelConfig]
    module: Callable[..., Any]
    """(config, vocabulary_size, *, rngs) -> the module."""
    forward_flops_per_token: Callable[[Any, int], float]
    """(config, vocabulary_size) -> operations of a token's forward pass; see `layers/flops.py` for what is counted."""
    training_flops_per_token: Callable[[Any, int], float] | None = None
    """The same of a training step; by default three times the forward pass, because every product has two more in the
    backward pass, one for each of its factors."""
    flops_by_the_paper: Callable[[Any], float] | None = None
    """(config) -> operations of a predicted token as the family's paper counts them, where it says how."""
    overlap: Callable[[Any], int] = lambda config: 0
    """(config) -> tokens that a window repeats of the one before."""
    rate_factor: Callable[[Any, str], float] = lambda config, name: 1.0
    """(config, first name of a parameter) -> factor on its learning rate; 0 where training leaves it as it is."""
    extends: Callable[[Any, ModelConfig], bool] = operator.eq
    """(config, that of another run) -> whether training may begin with the other's parameters."""
    in_order: Callable[[Any], str | None] = lambda config: "its windows are read one after the other"
    """(config) -> why the blocks of a segment cannot lie on several devices (`MeshConfig.sequence`); None where they
    can."""
    num_visible: Callable[[Any, np.ndarray], np.ndarray] = lambda config, position: position % config.window_length + 1
    """(config, positions in a document) -> how many tokens a token there attends to, itself included, in a layer that
    attends to no memory beyond its cache; by default those of its block."""
    carry_axes: Callable[[Any, Any], Any] = lambda config, carry: jax.tree.map(lambda _: ("lanes",), carry)
    """(config, carry) -> the logical axes of each of its arrays, beginning with the first; further axes are not cut."""
    reading_apart: Callable[[Any, int], Any] = lambda config, num_tokens: config
    """(config, tokens) -> the config of the same model, as it reads sequences of so many tokens that have nothing to do
    with each other; by default as it reads all others."""


def shortformer_visible(config: ShortformerConfig, position: np.ndarray) -> np.ndarray:
    """What is cached when a token's block begins, and the block up to it."""
    offset = position % config.window_length
    return np.minimum(position - offset, config.cache_length) + offset + 1


def pretrained_visible(config: PretrainedConfig, position: np.ndarray) -> np.ndarray:
    """A token's window up to it, and what that repeats of the window before; not what a recurrence inserts."""
    later = config.overlap + (position - config.overlap) % config.stride
    return np.where(position < config.window_length, position, later) + 1


FAMILIES = {
    "decoder": Family(
        DecoderConfig,
        Decoder,
        lambda config, vocabulary_size: config.flops(vocabulary_size).forward,
        lambda config, vocabulary_size: config.flops(vocabulary_size).training,
        extends=same_but_for("activation_dtype", "dropout_rate", "remat"),
        in_order=lambda config: config.waits_for,
        num_visible=DecoderConfig.num_visible,
        carry_axes=carry_axes,
    ),
    "pretrained": Family(
        PretrainedConfig,
        PretrainedDecoder,
        pretrained_flops.forward_flops_per_token,
        pretrained_flops.training_flops_per_token,
        flops_by_the_paper=pretrained_flops.paper_flops_per_token,
        overlap=lambda config: config.overlap,
        rate_factor=lambda config, name: (
            config.recurrence_rate if name == "recurrence" else float(config.train_decoder)
        ),
        extends=PretrainedConfig.extends,
        num_visible=pretrained_visible,
        reading_apart=lambda config, num_tokens: dataclasses.replace(config, window_length=num_tokens, overlap=0),
    ),
    "shortformer": Family(
        ShortformerConfig,
        Shortformer,
        shortformer_flops_per_token,
        extends=same_but_for("activation_dtype", *DROPOUT_RATES, "remat"),
        num_visible=shortformer_visible,
    ),
}
"""By the names that `RunConfig.model` is bound to."""


def family_name(config: ModelConfig) -> str:
    """The name in FAMILIES of the family that a config belongs to."""
    return next(name for name, family in FAMILIES.items() if family.config is type(config))


def check_sequence(config: ModelConfig, segment_length: int, parts: int) -> None:
    """Whether segments of this length can be cut into so many parts (`MeshConfig.sequence`).

    Raises:
      UserError: the model can't be cut, or the blocks can't be shared out evenly.
    """
    if parts == 1:
        return
    if reason := FAMILIES[family_name(config)].in_order(config):
        raise UserError(f"MeshConfig.sequence={parts} must be 1 for this {family_name(config)} model: {reason}")
    if segment_length % (parts * config.window_length):
        raise UserError(
            f"MeshConfig.sequence={parts} must divide the blocks of a segment: segment_length={segment_length} is not "
            f"a multiple of {parts} x window_length={config.window_length}"
        )


def extends(config: ModelConfig, other: ModelConfig) -> bool:
    """Whether a model of this config may begin with the parameters of one of the other's."""
    return FAMILIES[family_name(config)].extends(config, other)
