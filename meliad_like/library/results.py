"""The results of a language model: states, probabilities, hidden states and texts."""

import dataclasses
import functools
import math
from pathlib import Path

import jax
import numpy as np
from jaxtyping import Bool, Float, Int

from meliad_like.evaluation.scores import ratio
from meliad_like.generation.reading import NO_TOKEN, GenerationState, save_state, take_states
from meliad_like.resumable import check_same
from meliad_like.run.opening import OpenedCheckpoint
from meliad_like.run.text import carry_identity
from meliad_like.training.checkpoints import named_arrays


@dataclasses.dataclass(frozen=True, eq=False)
class State:
    """The memory of a model after a text. Its size does not depend on the length of the text.

    No method changes a state, so any number of texts can continue it. The states of one batch share
    their memory, which is kept as long as one of them; `copy` separates a state from its batch.
    """

    opened: OpenedCheckpoint
    """The model."""
    batch: GenerationState
    """The states of the batch in which the text was read."""
    lane: int = 0
    """The index of this state in the batch."""
    unfinished: bytes = b""
    """The bytes of a character that the text has not completed."""

    @functools.cached_property
    def batch_of_one(self) -> GenerationState:
        """The state as a batch of one."""
        return self.batch if len(self.batch.token) == 1 else take_states(self.batch, [self.lane])

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the text."""
        return int(self.batch.num_read[self.lane] + (self.batch.token[self.lane] != NO_TOKEN))

    def __repr__(self) -> str:
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self.batch.carry)) // len(self.batch.token)
        return f"State(after {self.num_tokens:,} tokens, {num_bytes:,} bytes)"

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Everything that the model remembers, by name, such as `layers/2/recurrent_states/states`, [r, d].

        The last token of the text is not part of it yet: a model reads this token when it continues the text. Arrays
        may have places, such as those of an empty cache, that no later token sees.
        """
        return {name: np.asarray(leaf)[0] for name, leaf in named_arrays(self.batch_of_one.carry).items()}

    def difference(self, other: "State") -> dict[str, float]:
        """The largest absolute difference of two states of one model in each of the `arrays`, by name."""
        other.check_model(self.opened)
        first, second = self.arrays, other.arrays
        return {name: float(np.max(np.abs(x.astype(float) - second[name]), initial=0)) for name, x in first.items()}

    def check_model(self, opened: OpenedCheckpoint) -> None:
        """Raises a UserError if this is a state of another model."""
        if opened is not self.opened:
            identities = map(carry_identity, (self.opened, opened))
            check_same("the state", *identities, way_out="let this model read the text")

    def copy(self) -> "State":
        """The same state with memory of its own."""
        return dataclasses.replace(self, batch=take_states(self.batch, [self.lane]), lane=0)

    def save(self, path: str | Path) -> None:
        """Writes the state to a file for `LanguageModel.resume`, also on `gs://`.

        Raises:
          UserError: the file can't be written; an earlier file is unchanged.
        """
        save_state(path, self.batch_of_one, self.unfinished, carry_identity(self.opened))


@dataclasses.dataclass(frozen=True, eq=False)
class Score:
    """The probability of a text, token by token."""

    tokens: Int[np.ndarray, " n"]
    log_probabilities: Float[np.ndarray, " n"]
    """The natural logarithm of each token's probability after all tokens before it. The first token of a document,
    which nothing precedes, has none: NaN. Nor has the first one after a generated end of document, which is left out.
    Together the probabilities of all ids are 1, also of those that are never written."""
    most_likely: Bool[np.ndarray, " n"]
    """Whether each token has a probability, and no other token has a larger one."""
    num_bytes: int
    """The number of bytes of the text in UTF-8; if tokens were given, of what they decode to."""
    state: State = dataclasses.field(repr=False)
    """The state after the text."""

    @property
    def log_probability(self) -> float:
        """The sum of the log-probabilities of all tokens that have one."""
        return float(np.nansum(self.log_probabilities, dtype=np.float64))

    @property
    def bits_per_byte(self) -> float:
        """The bits of all tokens with a probability, over all bytes, as the evaluation counts them; NaN of none."""
        return ratio(-self.log_probability / math.log(2), self.num_bytes)


@dataclasses.dataclass(frozen=True, eq=False)
class Outputs:
    """The numbers that a model computes for each token of a text."""

    tokens: Int[np.ndarray, " n"]
    logits: Float[np.ndarray, "n v"]
    """The logits of the token that follows each token, float32."""
    hidden: dict[int, Float[np.ndarray, "n d"]]
    """The output of each layer that was asked for, before the final norm."""


@dataclasses.dataclass(frozen=True, eq=False)
class Continuation:
    """A text that a model has written; `str` of it is the text."""

    text: str
    tokens: list[int]
    state: State = dataclasses.field(repr=False)
    """The state after the text. The model that `stream`s may use its memory again for the next piece."""
    ended: bool
    """Whether the last token ends the text."""

    def __str__(self) -> str:
        return self.text


@dataclasses.dataclass(frozen=True, eq=False)
class Hypothesis(Continuation):
    """A continuation that a beam search has found."""

    log_probability: float
    """The sum of the log-probabilities of its tokens."""
    score: float
    """`log_probability`, normalised by the length."""
