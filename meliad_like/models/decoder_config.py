"""The shape of a decoder: its baselines, recurrence, feedback and external memory differ in these fields alone."""

import dataclasses
from typing import Literal

from meliad_like.errors import UserError
from meliad_like.layers.memory import MemorySearch
from meliad_like.layers.recurrence import CellKind, GateKind
from meliad_like.models.named_layers import check_layers, layer_indices
from meliad_like.registry import resumable
from meliad_like.validation import check_choices, check_not_negative, check_positive, check_shares

Position = Literal["t5", "rotary", "infused", "none"]
ActivationDtype = Literal["float32", "bfloat16"]
Remat = Literal["none", "dots", "layers"]
Feedback = Literal["none", "last", "all"]
MemoryUpdate = Literal["block", "segment"]


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A stack of windowed attention layers, some of them recurrent. The defaults are the paper's 12-layer model."""

    num_layers: int = 12
    """Layers of the size, before `extra_layers`."""
    extra_layers: int = 0
    """Added to `num_layers`: the paper's 13-layer baselines are 1, whatever the size."""
    model_width: int = 1024
    num_heads: int = 8
    head_size: int = 128
    feedforward_width: int = 4096
    window_length: int = 512
    """Tokens that a token sees, and tokens in a block."""
    position: Position = "t5"
    """Inside the window: T5's bias by distance, rotary, none, or `infused`: sinusoids of the place in a tile of 2w are
    added to what queries and keys are made of, but not values (Shortformer, section 5.1). A document's first block has
    the places w to 2w - 1 too, where Shortformer's counts from 0."""
    recurrent_layers: tuple[int, ...] = ()
    """Which layers are recurrent; negative numbers count from the end (-3 of 12 is the paper's layer 10)."""
    num_states: int = 512
    """State vectors of a recurrent layer."""
    gate: GateKind = "fixed"
    cell: CellKind = "skip"
    clear_states: bool = False
    """Start every segment with the initial states: what is the recurrence worth beyond a segment?"""
    feedback: Feedback = "none"
    """Whose states from before a block all other layers read too (appendix E): the last recurrent layer's, or all."""
    memory_layers: tuple[int, ...] = ()
    """Which layers have an external memory (Memorizing Transformers); negative numbers count from the end."""
    memory_size: int = 65_536
    """Keys and values that a memory holds for each lane and head; then the oldest are overwritten."""
    memory_neighbors: int = 128
    """Memories that a token attends to."""
    memory_search: MemorySearch = "exact"
    """The nearest memories, or as in the reference the nearest of each of `memory_neighbors` strided buckets."""
    memory_update: MemoryUpdate = "block"
    """When tokens become memories: after their block, or as in the reference after their segment, which is the same
    where segments are one block long; if not, results depend on where segments begin."""
    dropout_rate: float = 0.0
    logit_scale: float | None = None
    """What hidden states are multiplied with before the softmax; by default 1 / sqrt(model_width)."""
    mask_empty_cache: bool = True
    """Whether a document's first tokens ignore the empty cache. The reference lets them see zeros instead."""
    activation_dtype: ActivationDtype = "float32"
    remat: Remat = resumable("none")
    """What the backward pass computes again: nothing, all but matrix products (`dots`), or whole layers."""

    def __post_init__(self):
        check_choices(self)
        sizes = ("num_layers", "model_width", "num_heads", "head_size", "feedforward_width", "window_length")
        check_positive(self, (*sizes, "num_states", "memory_size", "memory_neighbors"))
        check_not_negative(self, ("extra_layers",))
        check_shares(self, ("dropout_rate",))
        if self.position == "rotary" and self.head_size % 2:
            raise UserError(f"head_size={self.head_size} must be even for position=rotary")
        if self.position == "infused":
            if self.model_width % 2 or self.model_width < 4:
                raise UserError(f"model_width={self.model_width} must be even, and at least 4, for position=infused")
            if not self.mask_empty_cache:
                raise UserError("position='infused' needs mask_empty_cache=True: keys of an empty cache have no places")
        for field in ("recurrent_layers", "memory_layers"):
            check_layers(self, field, self.total_layers)
        if self.recurrent_indices & self.memory_indices:
            raise UserError(
                f"recurrent_layers={self.recurrent_layers} and memory_layers={self.memory_layers} share a layer: "
                "one that is recurrent has no external memory"
            )
        if self.feedback != "none" and not self.recurrent_layers:
            raise UserError(f"feedback={self.feedback!r} needs recurrent_layers, whose states are fed back")
        if self.memory_layers:
            self._check_memory()

    def _check_memory(self) -> None:
        if self.memory_size % self.window_length:
            raise UserError(
                f"memory_size={self.memory_size} must be a multiple of window_length={self.window_length}: "
                "tokens are remembered a block at a time"
            )
        if self.memory_size < self.memory_neighbors or (
            self.memory_search == "bucketed" and self.memory_size % self.memory_neighbors
        ):
            rule = "a multiple of" if self.memory_search == "bucketed" else "at least"
            raise UserError(
                f"memory_size={self.memory_size} must be {rule} memory_neighbors={self.memory_neighbors} "
                f"for memory_search={self.memory_search!r}"
            )

    @property
    def total_layers(self) -> int:
        return self.num_layers + self.extra_layers

    @property
    def recurrent_indices(self) -> frozenset[int]:
        """The recurrent layers, counted from 0."""
        return layer_indices(self.recurrent_layers, self.total_layers)

    @property
    def memory_indices(self) -> frozenset[int]:
        """The layers with an external memory, counted from 0."""
        return layer_indices(self.memory_layers, self.total_layers)

    @property
    def needs_segments(self) -> bool:
        """Whether what is remembered depends on where segments end."""
        return self.clear_states or (bool(self.memory_layers) and self.memory_update == "segment")

    @property
    def num_read_states(self) -> int:
        """States that a layer reads which is not itself recurrent."""
        return {"none": 0, "last": 1, "all": len(self.recurrent_layers)}[self.feedback] * self.num_states
