"""What a token costs, counted from the config: the floating-point operations of all matrix products.

A product of [i, j] and [j, k] is 2 i j k operations. Attention counts its tiles of `w` queries by `2w` keys in full, as
they are computed, although a query sees half of its tile. Norms, softmax, activations and the gather of embeddings are
not matrix products and are not counted; nor is what rematerialisation computes twice.
"""

from typing import NamedTuple


class Flops(NamedTuple):
    """Operations of one token."""

    forward: float
    backward: float

    @classmethod
    def of_products(cls, forward: float) -> "Flops":
        """Matrix products of which each has two more in the backward pass, one for each of its factors."""
        return cls(forward, 2 * forward)

    @property
    def training(self) -> float:
        """Forward and backward pass."""
        return self.forward + self.backward
