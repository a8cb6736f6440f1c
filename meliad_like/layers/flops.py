"""The cost of a token, counted from the config: the floating-point operations of all matrix products.

A product of [i, j] and [j, k] is 2 i j k operations. Attention counts its tiles of `w` queries by `2w` keys in full, as
they are computed, although a query sees half of its tile. Norms, softmax, activations and the gather of embeddings are
not matrix products and are not counted; nor are the operations that rematerialisation repeats.
"""

from typing import NamedTuple


class Flops(NamedTuple):
    """The operations of one token in the forward and in the backward pass."""

    forward: float
    backward: float

    @classmethod
    def of_products(cls, forward: float) -> "Flops":
        """The cost of matrix products: each has two more products in the backward pass, one for each of its factors."""
        return cls(forward, 2 * forward)

    def __add__(self, other: "Flops") -> "Flops":  # type: ignore[override]
        return Flops(self.forward + other.forward, self.backward + other.backward)

    @property
    def training(self) -> float:
        """The operations of the forward and the backward pass together."""
        return self.forward + self.backward
