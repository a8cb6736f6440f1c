"""Selectors: models that predict how much a span of the distant past helps to predict the next tokens.

Both predict the gain of equation 2 of Ancient History Language Models (Koncel-Kedziorski and Smith 2021), in nats, and
use a pretrained decoder as their encoder. `joint`, the paper's (section 2), reads `[span; context]`, and the last
token's vector goes through Linear, ReLU, Linear. `light` reads span and context separately, so that a span is read once
per document and the context once per stride, and multiplies two vectors of `head_width` (docs/ancient_history.md).

The parameters are a tree: `encoder` (those of the decoder), `standard` (means and standard deviations of its vectors
and of the scores, which are not trained) and `head`.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from meliad_like.errors import UserError
from meliad_like.history.config import Part, SelectorConfig
from meliad_like.layers.basic import fan_in
from meliad_like.models.model import Model
from meliad_like.models.pretrained.config import PretrainedConfig

Params = dict[str, Any]


def encoder_config(
    config: SelectorConfig, pretrained: PretrainedConfig, widths: Mapping[Part, int]
) -> PretrainedConfig:
    """The config of the decoder in a selector that reads at most this number of tokens of each part.

    Raises a UserError if the decoder has fewer layers or positions.
    """
    if config.encoder_layers > pretrained.num_layers:
        raise UserError(
            f"SelectorConfig.encoder_layers={config.encoder_layers} is more than the {pretrained.num_layers} layers of "
            "the pretrained model"
        )
    return dataclasses.replace(
        pretrained,
        num_layers=config.encoder_layers or pretrained.num_layers,
        window_length=max(widths[part] for part in config.parts),
        overlap=0,
        dropout_rate=config.dropout_rate,
        activation_dtype=config.activation_dtype,
        # There are no logits, and no recurrence between windows.
        tied_embedding=True,
        recurrence=(),
        train_decoder=True,
    )


def encoder_params(config: PretrainedConfig, params: Params) -> Params:
    """The parameters of a pretrained decoder that an encoder of this config has."""
    used = {name: value for name, value in params.items() if name not in ("recurrence", "output_embedding")}
    return used | {"blocks": {i: params["blocks"][i] for i in range(config.num_layers)}}


@dataclasses.dataclass(frozen=True)
class Selector:
    """A selector without its parameters; hashable, so that it can be a static argument."""

    config: SelectorConfig
    encoder_config: PretrainedConfig
    vocabulary_size: int

    @functools.cached_property
    def encoder(self) -> Model:
        return Model(self.encoder_config, self.vocabulary_size)

    @property
    def vector_width(self) -> int:
        """Width of the result of `encode`."""
        return self.encoder_config.model_width * (1 + self.config.pools_mean)

    @property
    def fixed_parameters(self) -> frozenset[str]:
        """First names of the parameters that are not trained."""
        return frozenset({"standard"} if self.config.train_encoder else {"standard", "encoder"})

    def carry_axes(self, carry: Any) -> Any:
        """The logical axes of the carry, which is empty: nothing is remembered between batches."""
        return carry

    @property
    def axes(self) -> Params:
        """The logical axes of the parameters of `init`."""
        axes = jax.tree.map(lambda x: (None,) * x.ndim, jax.eval_shape(self.init, jax.random.key(0)))
        return axes | ({"encoder": self.encoder.axes} if self.config.train_encoder else {})

    def init(self, key: PRNGKeyArray) -> Params:
        """Fresh parameters, float32; `standard` changes nothing yet.

        Those of the encoder are zeros, and only there if it is trained.
        """
        width, hidden, parts = self.vector_width, self.config.head_width, self.config.parts
        keys = iter(jax.random.split(key, 4))

        def linear(size_in: int, size_out: int) -> Params:
            return {"kernel": fan_in(next(keys), (size_in, size_out), jnp.float32), "bias": jnp.zeros(size_out)}

        head = {part: linear(width, hidden) for part in parts}
        head |= {f"{part}_output": linear(hidden, 1) for part in parts}
        shapes = {**dict.fromkeys(parts, (width,)), "scores": ()}
        standard = {name: {"mean": jnp.zeros(shape), "deviation": jnp.ones(shape)} for name, shape in shapes.items()}
        params = {"standard": standard, "head": head}
        if self.config.train_encoder:
            params["encoder"] = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.encoder.abstract_params)
        return params

    def encode(
        self,
        params: Params,
        tokens: Int[Array, "b t"],
        length: Int[Array, " b"],
        dropout_key: PRNGKeyArray | None = None,
    ) -> Float[Array, "b e"]:
        """Texts as vectors, float32, after the decoder's final norm (`SelectorConfig.pools_mean`).

        Args:
            params: those of the encoder.
            length: number of tokens of each text, at least 1; attention is causal, so padding changes nothing.
            dropout_key: for training; None: no dropout.
        """
        module = self.encoder.bind(params)
        hidden, lanes = module.read_window(tokens, dropout_key=dropout_key)[-1], jnp.arange(len(length))
        if not self.config.pools_mean:
            return module.final_norm(hidden[lanes, length - 1]).astype(jnp.float32)
        hidden = module.final_norm(hidden).astype(jnp.float32)
        counts = jnp.arange(tokens.shape[1]) < length[:, None]
        mean = jnp.sum(jnp.where(counts[..., None], hidden, 0.0), axis=1) / length[:, None]
        return jnp.concatenate([mean, hidden[lanes, length - 1]], axis=-1)

    def project(self, params: Params, part: Part, vectors: Float[Array, "b e"]) -> Float[Array, "b w"]:
        """The head's first layer for a part, without its activation; it is kept for spans that are scored often."""
        standard, layer = params["standard"][part], params["head"][part]
        return (vectors - standard["mean"]) / standard["deviation"] @ layer["kernel"] + layer["bias"]

    def score(self, params: Params, projected: dict[Part, Float[Array, "_ w"]]) -> Float[Array, " b"]:
        """Scores in nats from the result of `project` for each part; a part may have one row for all scores.

        `joint`: Linear(ReLU(projected)). `light`: this for span and for context, because some spans help anywhere and
        at some places any span helps, plus the scalar product of the two divided by the root of its width.
        """
        scores = jnp.zeros(())
        for part, values in projected.items():
            output = params["head"][f"{part}_output"]
            scores += (jax.nn.relu(values) @ output["kernel"] + output["bias"])[:, 0]
        if "context" in projected:
            scores += jnp.sum(projected["span"] * projected["context"], axis=-1) * self.config.head_width**-0.5
        standard = params["standard"]["scores"]
        return standard["mean"] + standard["deviation"] * scores

    def score_vectors(self, params: Params, vectors: dict[Part, Float[Array, "b e"]]) -> Float[Array, " b"]:
        """`project` and `score`."""
        return self.score(params, {part: self.project(params, part, vectors[part]) for part in self.config.parts})

    def encoder_flops_per_token(self, num_tokens: int) -> float:
        """Operations of the encoder per token, when `num_tokens` are read together (`layers/flops.py`)."""
        return dataclasses.replace(self.encoder_config, window_length=num_tokens).flops(0).forward
