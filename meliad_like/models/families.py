"""The model families: the configs that a run's model may have, and the module that each of them builds.

A family is a frozen config dataclass, a module that follows the contract of docs/design.md, and a count of operations.
Code for more than one family is only here; the trainer, the evaluator and the generator name no family.
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
    """The attributes that the configs of all families have. A config is hashable, and validated when it is created."""

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
        """Whether the carry depends on where segments end. If so, the model can't generate text."""
        ...


def same_but_for(*names: str) -> Callable[[Any, ModelConfig], bool]:
    """A test whether two configs are of one family and equal in all fields except these."""

    def same(config: Any, other: ModelConfig) -> bool:
        if type(config) is not type(other):
            return False
        return dataclasses.replace(config, **{name: getattr(other, name) for name in names}) == other

    return same


class Family(NamedTuple):
    """A kind of model, and the functions of its config that the rest of the package needs."""

    config: type[ModelConfig]
    module: Callable[..., Any]
    """(config, vocabulary_size, *, rngs) -> the module."""
    forward_flops_per_token: Callable[[Any, int], float]
    """(config, vocabulary_size) -> operations of a token's forward pass, counted as `layers/flops.py` describes."""
    training_flops_per_token: Callable[[Any, int], float] | None = None
    """(config, vocabulary_size) -> operations of a token in training; by default three times the forward pass, because
    every product has two more in the backward pass, one for each of its factors."""
    flops_by_the_paper: Callable[[Any], float] | None = None
    """(config) -> operations of a predicted token as the family's paper counts them; None if the paper doesn't."""
    overlap: Callable[[Any], int] = lambda config: 0
    """(config) -> the number of tokens of the window before that a window repeats."""
    rate_factor: Callable[[Any, str], float] = lambda config, name: 1.0
    """(config, first name of a parameter) -> factor on its learning rate; 0: the parameter is not trained."""
    extends: Callable[[Any, ModelConfig], bool] = operator.eq
    """(config, config of another run) -> whether training may start from the parameters of the other run."""
    in_order: Callable[[Any], str | None] = lambda config: "its windows are read one after the other"
    """(config) -> why a segment can't be sharded over devices (`MeshConfig.sequence`); None if it can."""
    num_visible: Callable[[Any, np.ndarray], np.ndarray] = lambda config, position: position % config.window_length + 1
    """(config, positions in a document) -> number of tokens, itself included, that a token there attends to in a layer
    without memory beyond its cache; by default those of its block."""
    carry_axes: Callable[[Any, Any], Any] = lambda config, carry: jax.tree.map(lambda _: ("lanes",), carry)
    """(config, carry) -> the logical axes of each array, from the first axis; axes not listed are not sharded."""
    for_separate_sequences: Callable[[Any, int], Any] = lambda config, num_tokens: config
    """(config, length) -> the config of the same model for reading independent sequences of this number of tokens; by
    default the config itself."""


def shortformer_visible(config: ShortformerConfig, position: np.ndarray) -> np.ndarray:
    """`num_visible` of a Shortformer: the cache at the beginning of the block, and the block up to the token."""
    offset = position % config.window_length
    return np.minimum(position - offset, config.cache_length) + offset + 1


def pretrained_visible(config: PretrainedConfig, position: np.ndarray) -> np.ndarray:
    """`num_visible` of a pretrained decoder: the window up to the token, without the vectors of a recurrence."""
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
        for_separate_sequences=lambda config, num_tokens: dataclasses.replace(
            config, window_length=num_tokens, overlap=0
        ),
    ),
    "shortformer": Family(
        ShortformerConfig,
        Shortformer,
        shortformer_flops_per_token,
        extends=same_but_for("activation_dtype", *DROPOUT_RATES, "remat"),
        num_visible=shortformer_visible,
    ),
}
"""The families by the names that `RunConfig.model` is bound to."""


def family_name(config: ModelConfig) -> str:
    """The name in FAMILIES of the family that a config belongs to."""
    return next(name for name, family in FAMILIES.items() if family.config is type(config))


def check_sequence(config: ModelConfig, segment_length: int, parts: int) -> None:
    """Checks that segments of this length can be sharded over `parts` devices (`MeshConfig.sequence`).

    Raises:
      UserError: the model does not allow it, or the number of blocks is not a multiple of `parts`.
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
    """Whether the training of a model may start from the parameters of a model with the other config."""
    return FAMILIES[family_name(config)].extends(config, other)
