"""A model without its parameters: it is built once, and jitted functions take the parameters as a plain tree."""

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import PRNGKeyArray

from meliad_like.models.base import ModelConfig


@dataclasses.dataclass
class ParameterKeys:
    """The keys that `nnx.Rngs(key)` gives to parameters, counted in Python.

    The counter of `nnx.Rngs` is an array: each of its updates walks through all that was traced before, so that the
    time to trace a model grew with the square of its parameter arrays.
    """

    key: PRNGKeyArray
    count: int = 0

    def params(self) -> PRNGKeyArray:
        """The next key."""
        self.count += 1
        return jax.random.fold_in(self.key, self.count - 1)


@dataclasses.dataclass(frozen=True)
class Model:
    """A language model without its parameters; hashable, so that it can be a static argument."""

    config: ModelConfig
    vocabulary_size: int

    def _build(self, key: PRNGKeyArray) -> nnx.Module:
        return self.config.build(self.vocabulary_size, rngs=cast(nnx.Rngs, ParameterKeys(key)))

    @functools.cached_property
    def _abstract(self) -> tuple[nnx.GraphDef, nnx.State]:
        return nnx.split(nnx.eval_shape(lambda: self._build(jax.random.key(0))))

    @property
    def axes(self) -> dict[str, Any]:
        """The logical axes of every parameter: the tree of `init` with tuples of names for arrays."""
        is_variable = lambda leaf: isinstance(leaf, nnx.Variable)  # noqa: E731
        variables = self._abstract[1]
        return nnx.to_pure_dict(jax.tree.map(lambda leaf: leaf.get_metadata("axes"), variables, is_leaf=is_variable))

    @property
    def abstract_params(self) -> dict[str, Any]:
        """The shapes and dtypes of the parameters."""
        return nnx.to_pure_dict(self._abstract[1])

    @property
    def num_parameters(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract_params))

    @functools.cached_property
    def rate_factors(self) -> dict[str, float]:
        """Factors on the learning rate that aren't 1, by the first name of a parameter; 0: it is not trained."""
        factors = {name: self.config.rate_factor(name) for name in self.abstract_params}
        return {name: factor for name, factor in factors.items() if factor != 1}

    @property
    def forward_flops_per_token(self) -> float:
        """The operations of the forward pass of one token in all layers, and of its logits."""
        return self.config.flops(self.vocabulary_size).forward

    @property
    def training_flops_per_token(self) -> float:
        """The operations of the forward and the backward pass of one token."""
        return self.config.flops(self.vocabulary_size).training

    @property
    def flops_per_prediction(self) -> dict[str, float]:
        """The operations of a predicted token in a long document, including tokens that windows read again.
        `as_counted` as `layers/flops.py` describes, and `by_the_paper` if the family's paper describes how to count."""
        w, paper = self.config.window_length, self.config.flops_by_the_paper()
        counted = self.forward_flops_per_token * w / (w - self.config.overlap)
        return {"as_counted": counted} | ({} if paper is None else {"by_the_paper": paper})

    def abstract_carry(self, num_lanes: int, *, decoding: bool = False) -> Any:
        """The shapes and dtypes of what is carried between segments, or with `decoding` between tokens."""

        def make(params):
            module = self.bind(params)
            carry = module.init_carry(num_lanes)
            return module.begin_decoding(carry) if decoding else carry

        return jax.eval_shape(make, self.abstract_params)

    @property
    def memory(self) -> list[jax.ShapeDtypeStruct]:
        """All that a document leaves for its next tokens: a lane's carry between two segments, without positions."""
        leaves = jax.tree.leaves(self.abstract_carry(1))
        return [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]

    def carry_axes(self, carry: Any) -> Any:
        """The logical axes of each array of a carry, from the first axis; axes not listed are not sharded."""
        return self.bind(self.abstract_params).carry_axes(carry)

    def for_separate_sequences(self, num_tokens: int) -> "Model":
        """The model with the same parameters for independent sequences of this number of tokens."""
        return Model(self.config.for_separate_sequences(num_tokens), self.vocabulary_size)

    def init(self, key: PRNGKeyArray) -> dict[str, Any]:
        """Fresh parameters: nested dictionaries of float32 arrays."""
        return nnx.to_pure_dict(nnx.state(self._build(key), nnx.Param))

    def bind(self, params: dict[str, Any]) -> Any:
        """The module with these parameters; cheap, meant to be called inside a jitted function."""
        graphdef, abstract = self._abstract
        state = jax.tree.map(lambda x: x, abstract)
        fixed = {name: params[name] for name, factor in self.rate_factors.items() if factor == 0}
        params = params | jax.lax.stop_gradient(fixed)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graphdef, state)
