"""The tests check the shapes in annotations, those of the functions in the rooms that conftest.py names."""

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from meliad_like.layers.basic import product


def test_shapes_that_do_not_fit_are_an_error():
    assert product(jnp.ones((2, 3)), jnp.ones((3, 4))).shape == (2, 4)
    with pytest.raises(TypeCheckError, match="'kernel'"):
        product(jnp.ones((2, 3)), jnp.ones((4, 3)))
