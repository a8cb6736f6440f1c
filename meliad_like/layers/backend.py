"""Computations that differ between platforms: one named choice for each, with what it does and why.

Results are the same but for rounding. A choice is made while a program is traced.
"""

import jax

MOST_UNROLLED = 8
"""The largest number of blocks over which a TPU's program unrolls a scan: the number in the paper's segments."""


def platform() -> str:
    """The platform for which the traced program is compiled: `cpu`, `gpu` or `tpu`.

    It is JAX's default platform, or the platform of the mesh, whose devices may be only planned and not present.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform


def transposes_before_products() -> bool:
    """CPU: for the gradient of a kernel, the narrower of the two factors is transposed before they are multiplied.

    A product that sums over the first axis of both sides is what XLA does worst on a CPU. An input that several
    products share is transposed instead, once for all.
    """
    return platform() == "cpu"


def sums_by_products() -> bool:
    """CPU: the gradients of factors and biases that many numbers share, as filters, are sums as products with ones.

    XLA's own sum over the first axes of a large array takes up to forty times as long, and over the last one up to ten
    (jaxlib 0.10.2).
    """
    return platform() == "cpu"


def keeps_only_named_values() -> bool:
    """Accelerators: the backward pass keeps only values with a name (`LINEAR`, `RELU`, ...) and computes others again.
    Writing a value to memory and reading it again takes longer there than computing it."""
    return platform() != "cpu"


def looks_up_logits_of_targets() -> bool:
    """TPU: the logit of a target is a masked sum over the vocabulary, because lookups are slow there; elsewhere it is
    looked up."""
    return platform() != "tpu"


def takes_norm_of_updates_first() -> bool:
    """CPU: the norm of the updates is computed before they are added to the parameters, and checked to be finite.

    A CPU computes the updates while the gradients are in its caches. Elsewhere this would be one more pass over
    gradient and momentum before the first parameter is written, so the norm is that of the parameters' difference. From
    a finite gradient only an absurd learning rate makes an infinite update.
    """
    return platform() == "cpu"


def sums_shares_of_gradients() -> bool:
    """All but TPUs: where copies of the parameters divide the update, each gets the sum of its share of a gradient.

    A TPU's compiler would cut the products that compute the gradient into pieces, and copy their factors for it; there
    each copy gets the whole sum.
    """
    return platform() != "tpu"


def adds_heads_one_by_one() -> bool:
    """CPU: a matrix is copied for the heads that share it, so that its gradient adds theirs one by one.

    XLA sums the products of two arrays over a middle axis fifty times as slowly (jaxlib 0.10.2).
    """
    return platform() == "cpu"


def fills_whole_triangles() -> bool:
    """Accelerators: the blocks of a triangular matrix are computed by products of the size of the whole matrix.

    These have many times the operations of products of the blocks, but the smallest blocks would fill few of the lanes.
    """
    return platform() != "cpu"


def unrolls_blocks(num_blocks: int) -> bool:
    """TPU: the scan of recurrent states over few blocks is unrolled.

    Nothing is then written into arrays of all blocks for the backward pass, but compilation takes longer.
    """
    return platform() == "tpu" and num_blocks <= MOST_UNROLLED
