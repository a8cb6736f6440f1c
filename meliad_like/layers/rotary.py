"""Rotary positions; for published models their scalings, and angles that don't grow with the document."""

import dataclasses
import math
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from meliad_like.errors import UserError
from meliad_like.registry import Registry, size

ROTARY_SCALINGS = Registry("rotary_scaling")


def wavelengths(head_size: int, base: float = 10_000.0) -> Float[np.ndarray, " half"]:
    """The wavelengths of rotary embeddings over 2 pi, in tokens: from 1 to almost `base`, one for each pair."""
    half = head_size // 2
    return base ** (np.arange(half, dtype=np.float32) / half)


class Turns(NamedTuple):
    """The cosines and sines of the angles of some places, float32."""

    cosine: Float[Array, "*batch half"]
    sine: Float[Array, "*batch half"]


def turned(x: Float[Array, "*batch k"], turns: Turns) -> Float[Array, "*batch k"]:
    """The vectors of heads, rotated by their turns; channels that have no turns stay as they are."""
    half = turns.cosine.shape[-1]
    first, second, rest = (y.astype(jnp.float32) for y in jnp.split(x, [half, 2 * half], axis=-1))
    parts = first * turns.cosine - second * turns.sine, second * turns.cosine + first * turns.sine, rest
    return jnp.concatenate(parts, axis=-1).astype(x.dtype)


def rotate(
    x: Float[Array, "*batch s k"], position: Int[Array, "*#batch s"], wavelength: Float[np.ndarray, " half"]
) -> Float[Array, "*batch s k"]:
    """Rotary embedding (Su et al. 2021) of the two halves of each head by `position`. Only differences of positions
    matter, so callers count from wherever is convenient."""
    angle = jnp.asarray(position, jnp.float32)[..., None] / wavelength
    return turned(x, Turns(jnp.cos(angle), jnp.sin(angle)))


@ROTARY_SCALINGS.register("none")
class RotaryScaling:
    """The kind without a scaling, and the base class of the other kinds."""

    extends_windows: ClassVar[bool] = False
    """Whether a window may have more tokens than `PretrainedConfig.max_positions`."""

    @property
    def attention_scale(self) -> float:
        """The factor on rotated queries and keys."""
        return 1.0

    def wavelengths(self, head_size: int, base: float, longer: float) -> Float[np.ndarray, " half"]:
        """The wavelength over 2 pi of each pair of a head's elements, in tokens. `longer` is the ratio of the number of
        tokens in a window to `PretrainedConfig.max_positions`."""
        del longer
        return wavelengths(head_size, base)


@dataclasses.dataclass(frozen=True)
class FactorScaling(RotaryScaling):
    """The base class of scalings by a factor."""

    factor: float = 1.0
    """The factor by which windows may be longer."""

    def __post_init__(self):
        if not self.factor >= 1:
            raise UserError(f"{type(self).__name__}.factor={self.factor} must be at least 1")


@ROTARY_SCALINGS.register("linear")
class LinearScaling(FactorScaling):
    """Every wavelength times the factor (Chen et al. 2023, Extending Context Window by Positional Interpolation)."""

    def wavelengths(self, head_size, base, longer):
        return super().wavelengths(head_size, base, longer) * np.float32(self.factor)


@ROTARY_SCALINGS.register("dynamic")
class DynamicScaling(FactorScaling):
    """A larger base in windows of more than `max_positions` tokens (Peng et al. 2023, YaRN, section 3.3).

    The base follows from the length of the window. Transformers computes it from the length of the sequence so far:
    so it gives other logits to sequences that don't fill a window of more than `max_positions` tokens.
    """

    extends_windows: ClassVar[bool] = True

    def wavelengths(self, head_size, base, longer):
        stretch = self.factor * max(longer, 1.0) - (self.factor - 1)
        return wavelengths(head_size, base * stretch ** (head_size / (head_size - 2)))


@dataclasses.dataclass(frozen=True)
class ScalingByParts(FactorScaling):
    """The base class of scalings that leave short wavelengths as they are and multiply long ones by the factor."""

    original_positions: int = size(8192, "fixed")
    """The number of tokens in a window before the extension."""

    def share_kept(self, head_size: int, base: float) -> Float[np.ndarray, " half"]:
        """The weight of the unscaled frequency of each pair; the scaled frequency has the rest."""
        raise NotImplementedError

    def wavelengths(self, head_size, base, longer):
        share = self.share_kept(head_size, base)
        return (super().wavelengths(head_size, base, longer) / (share + (1 - share) / self.factor)).astype(np.float32)


@ROTARY_SCALINGS.register("llama3")
class Llama3Scaling(ScalingByParts):
    """The scaling of Llama 3.1, by how often a wavelength fits into the original window."""

    low_frequency_factor: float = 1.0
    """The limit of long wavelengths: those that fit into the original window less often are scaled."""
    high_frequency_factor: float = 4.0
    """The limit of short wavelengths: those that fit into the original window more often stay the same."""

    def share_kept(self, head_size, base):
        turns = self.original_positions / (2 * np.pi * wavelengths(head_size, base))
        low, high = self.low_frequency_factor, self.high_frequency_factor
        return np.clip((turns - low) / (high - low), 0, 1)


@ROTARY_SCALINGS.register("yarn")
class YarnScaling(ScalingByParts):
    """The scaling of YaRN (Peng et al. 2023, section 3.4).

    As in the authors' code, the share between the two limits is linear in the pair, in the paper in the turns.
    """

    fast_turns: float = 32.0
    """The limit of short wavelengths: pairs that turn more often in the original window stay as they are (beta)."""
    slow_turns: float = 1.0
    """The limit of long wavelengths: those of pairs that turn less often are multiplied by the factor (alpha)."""
    whole_limits: bool = True
    """Whether the limits are rounded to whole numbers of pairs, outwards."""
    scale: float | None = None
    """The factor on rotated queries and keys; None: 0.1 ln(factor) + 1 (equation 22)."""

    @property
    def attention_scale(self):
        return 0.1 * math.log(self.factor) + 1 if self.scale is None else self.scale

    def share_kept(self, head_size, base):
        def pair(turns: float) -> float:
            """The number of the pair, with a fraction, that turns so often in the original window."""
            return head_size * math.log(self.original_positions / (2 * math.pi * turns)) / (2 * math.log(base))

        low, high = pair(self.fast_turns), pair(self.slow_turns)
        if self.whole_limits:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_size - 1)
        # As in the authors' code, so that equal limits do not lead to a division by zero.
        ramp = (np.arange(head_size // 2) - low) / (high - low if high != low else 0.001)
        return 1 - np.clip(ramp, 0, 1)


@dataclasses.dataclass(frozen=True)
class RotaryTable:
    """The frequencies of rotary positions, which turn the first `2 * half` channels of a head: pairs are half of them
    apart. Angles are computed in float64, and only small places are asked for."""

    head_size: int
    """The number of channels that are rotated."""
    rotary_base: float
    scaling: RotaryScaling
    longer: float = 1.0
    """The ratio that `RotaryScaling.wavelengths` describes."""

    @property
    def wavelengths(self) -> Float[np.ndarray, " half"]:
        """The wavelength over 2 pi of each pair of channels, in tokens."""
        return self.scaling.wavelengths(self.head_size, self.rotary_base, self.longer)

    def of(self, places: Int[np.ndarray, "*batch"], *, scaled: bool = False) -> Turns:
        """The turns of known places; `scaled` multiplies them by the scaling's factor on queries and keys."""
        half = self.head_size // 2
        # The scaling's wavelengths are float32: a rounded one would be wrong by a whole turn in a long document.
        stretch = self.wavelengths / wavelengths(self.head_size, self.rotary_base)
        frequency = self.rotary_base ** -(np.arange(half) / half) / stretch
        angle, scale = np.asarray(places)[..., None] * frequency, self.scaling.attention_scale if scaled else 1.0
        return Turns(*(jnp.asarray(scale * x, jnp.float32) for x in (np.cos(angle), np.sin(angle))))
