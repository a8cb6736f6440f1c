"""A model without its parameters: it is built once, and jitted functions take the parameters as a plain tree."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import PRNGKeyArray

from meliad_like.models.families import FAMILIES, Family, ModelConfig, family_name


@dataclasses.dataclass(frozen=True)
class Model:
    """A language model without its parameters; hashable, so that it can be a static argument."""

    config: ModelConfig
    vocabulary_size: int

    @property
    def _family(self) -> Family:
        return FAMILIES[family_name(self.config)]

    def _build(self, key: PRNGKeyArray) -> nnx.Module:
        return self._family.module(self.config, self.vocabulary_size, rngs=nnx.Rngs(key))

    @functools.cached_property
    def _abstract(self) -> tuple[nnx.GraphDef, nnx.State]:
        return nnx.split(nnx.eval_shape(lambda: self._build(jax.random.key(0))))

    @property
    def axes(self) -> dict[str, Any]:
        """The logical axes of every parameter: the tree of `init` with tuples of names for arrays."""
        state = self._abstract[1]
        flat = nnx.to_flat_state(state)
        return _nested({path: variable.get_metadata("axes") for path, variable in flat})

    @property
    def abstract_params(self) -> dict[str, Any]:
        """The shapes and dtypes of the parameters."""
        return nnx.to_pure_dict(self._abstract[1])

    @property
    def num_parameters(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract_params))

    @property
    def overlap(self) -> int:
        """The number of tokens of the window before that a window repeats; for most families 0."""
        return self._family.overlap(self.config)

    def for_separate_sequences(self, num_tokens: int) -> "Model":
        """The model with the same parameters for independent sequences of this number of tokens.

        A pretrained decoder reads each sequence as one window. Other models keep their own windows, of which the last
        may extend beyond the sequence.
        """
        return Model(self._family.for_separate_sequences(self.config, num_tokens), self.vocabulary_size)

    @functools.cached_property
    def rate_factors(self) -> dict[str, float]:
        """Factors on the learning rate that aren't 1, by the first name of a parameter; for most families none."""
        factors = {name: self._family.rate_factor(self.config, name) for name in self.abstract_params}
        return {name: factor for name, factor in factors.items() if factor != 1}

    @functools.cached_property
    def fixed_parameters(self) -> frozenset[str]:
        """The first names of the parameters that are not trained; for most families none."""
        return frozenset(name for name, factor in self.rate_factors.items() if not factor)

    @property
    def forward_flops_per_token(self) -> float:
        """The operations of the forward pass of one token in all layers, and of its logits."""
        return self._family.forward_flops_per_token(self.config, self.vocabulary_size)

    @property
    def flops_per_prediction(self) -> dict[str, float]:
        """The operations of a predicted token in a long document, including tokens that windows read again.

        `as_counted` as `layers/flops.py` describes, and `by_the_paper` if the family's paper describes how to count.
        """
        counted = self.forward_flops_per_token * self.config.window_length / (self.config.window_length - self.overlap)
        paper = self._family.flops_by_the_paper
        return {"as_counted": counted} | ({"by_the_paper": paper(self.config)} if paper else {})

    @property
    def training_flops_per_token(self) -> float:
        """The operations of the forward and the backward pass of one token."""
        count = self._family.training_flops_per_token
        return 3 * self.forward_flops_per_token if count is None else count(self.config, self.vocabulary_size)

    def num_visible(self, position: np.ndarray) -> np.ndarray:
        """The number of tokens, itself included, that a token at each position of a document attends to."""
        return self._family.num_visible(self.config, position)

    def carry_axes(self, carry: Any) -> Any:
        """The logical axes of each array of a carry, from the first axis; axes not listed are not sharded."""
        return self._family.carry_axes(self.config, carry)

    def init(self, key: PRNGKeyArray) -> dict[str, Any]:
        """Fresh parameters: nested dictionaries of float32 arrays."""
        return nnx.to_pure_dict(nnx.state(self._build(key), nnx.Param))

    def bind(self, params: dict[str, Any]) -> Any:
        """The module with these parameters; cheap, meant to be called inside a jitted function."""
        graphdef, abstract = self._abstract
        state = jax.tree.map(lambda x: x, abstract)
        if fixed := self.fixed_parameters:
            params = {
                name: jax.tree.map(jax.lax.stop_gradient, value) if name in fixed else value
                for name, value in params.items()
            }
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graphdef, state)


def _nested(flat: dict[tuple, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = value
    return tree
