"""Selectors of ancient history: how much a span of the distant past will help to predict what comes next.

Both regress the gain of Equation 2 of Ancient History Language Models (Koncel-Kedziorski and Smith 2021), in nats, and
stand on a pretrained decoder:

- `joint`, the paper's (section 2): the decoder reads `[span; context]`, and the last token's vector goes through
  Linear, ReLU, Linear. Every candidate of every stride is read together with all of the context.
- `light`: span and context are read apart, so that a span is read once in a document and the context once in a stride,
  and a candidate of a stride costs a scalar product of two vectors of `head_width`. The paper leaves it as future work.

A model is built once, and its parameters are a tree: `encoder` (the decoder's), `standard` (means and deviations of its
vectors and of the scores, which training leaves alone) and `head`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from meliad_like.errors import UserError
from meliad_like.history.selectors.config import Part, SelectorConfig
from meliad_like.layers.basic import fan_in
from meliad_like.models.model import Model
from meliad_like.models.pretrained.config import PretrainedConfig
from meliad_like.models.pretrained.flops import forward_flops_per_token

Params = dict[str, Any]
NUM_POOLED = 2  # the light selector's vectors: the mean over the tokens, and the last token's vector


def encoder_config(config: SelectorConfig, pretrained: PretrainedConfig, num_tokens: int) -> PretrainedConfig:
    """The decoder of a selector that reads so many tokens at once, as a config of its own.

    Raises:
      UserError: the decoder has not so many layers or positions.
    """
    if config.encoder_layers > pretrained.num_layers:
        raise UserError(
            f"SelectorConfig.encoder_layers={config.encoder_layers} is more than the {pretrained.num_layers} layers of "
            "the pretrained model"
        )
    if num_tokens > pretrained.max_positions:
        raise UserError(
            f"the selector reads {num_tokens} tokens at once, a span and its context, and the pretrained model has "
            f"{pretrained.max_positions} positions: lower SelectorConfig.context_tokens"
        )
    return dataclasses.replace(
        pretrained,
        num_layers=config.encoder_layers or pretrained.num_layers,
        window_length=num_tokens,
        overlap=0,
        dropout_rate=config.dropout_rate,
        activation_dtype=config.activation_dtype,
        # Nothing is predicted, and nothing passes between windows.
        tied_embedding=True,
        insertion_layers=(),
        train_decoder=True,
    )


def encoder_params(config: PretrainedConfig, params: Params) -> Params:
    """Those parameters of a pretrained decoder that an encoder of this config has."""
    kept = {name: value for name, value in params.items() if name not in ("recurrence", "output_embedding")}
    return kept | {"blocks": {i: params["blocks"][i] for i in range(config.num_layers)}}


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
    def parts(self) -> tuple[Part, ...]:
        """What is encoded for a score."""
        return ("pair",) if self.config.kind == "joint" else ("span", "context")

    @property
    def vector_width(self) -> int:
        """Of what `encode` returns."""
        return self.encoder_config.model_width * (1 if self.config.kind == "joint" else NUM_POOLED)

    @property
    def fixed_parameters(self) -> frozenset[str]:
        """The first names of parameters that training leaves as they are."""
        return frozenset({"standard"} if self.config.train_encoder else {"standard", "encoder"})

    def init(self, key: PRNGKeyArray) -> Params:
        """Fresh parameters without the encoder's, float32. Nothing is standardised yet."""
        width, hidden = self.vector_width, self.config.head_width
        keys = iter(jax.random.split(key, 4))

        def linear(size_in: int, size_out: int) -> Params:
            return {"kernel": fan_in(next(keys), (size_in, size_out), jnp.float32), "bias": jnp.zeros(size_out)}

        head = {part: linear(width, hidden) for part in self.parts}
        head |= {f"{part}_output": linear(hidden, 1) for part in self.parts}
        widths = {**dict.fromkeys(self.parts, (width,)), "scores": ()}
        standard = {name: {"mean": jnp.zeros(shape), "deviation": jnp.ones(shape)} for name, shape in widths.items()}
        return {"standard": standard, "head": head}

    def encode(
        self,
        params: Params,
        tokens: Int[Array, "b t"],
        length: Int[Array, " b"],
        dropout_key: PRNGKeyArray | None = None,
    ) -> Float[Array, "b e"]:
        """Texts as vectors, float32, after the decoder's final norm.

        Args:
            params: the encoder's.
            tokens: from the beginning of the decoder's positions on.
            length: tokens of each text that count, at least 1; attention is causal, so what follows changes nothing.
            dropout_key: for training; none to keep everything.

        Returns:
            Of `joint` each last token's vector; of `light` the mean over the tokens as well, before it, because topics
            are in many tokens and the last one of a span is a separator.
        """
        module = self.encoder.bind(params)
        outputs, _ = module.read_window(tokens, jnp.zeros_like(length), dropout_key=dropout_key)
        hidden, lanes = outputs[-1], jnp.arange(len(length))
        if self.config.kind == "joint":
            return module.final_norm(hidden[lanes, length - 1]).astype(jnp.float32)
        hidden = module.final_norm(hidden).astype(jnp.float32)
        counts = jnp.arange(tokens.shape[1]) < length[:, None]
        mean = jnp.sum(jnp.where(counts[..., None], hidden, 0.0), axis=1) / length[:, None]
        return jnp.concatenate([mean, hidden[lanes, length - 1]], axis=-1)

    def project(self, params: Params, part: Part, vectors: Float[Array, "b e"]) -> Float[Array, "b w"]:
        """The head's first layer for a part, without its activation: what is kept of spans that are scored often."""
        standard, layer = params["standard"][part], params["head"][part]
        return (vectors - standard["mean"]) / standard["deviation"] @ layer["kernel"] + layer["bias"]

    def score(self, params: Params, projected: dict[Part, Float[Array, "_ w"]]) -> Float[Array, " b"]:
        """Scores in nats from what `project` gave of each part; a part may have one row for all scores.

        `joint`: Linear(ReLU(projected)). `light`: the scalar product of span and context (over the root of its width),
        and what either says alone: spans that help anywhere, and places where any span does.
        """
        head = params["head"]
        scores = jnp.zeros(())
        for part, values in projected.items():
            output = head[f"{part}_output"]
            scores += (jax.nn.relu(values) @ output["kernel"] + output["bias"])[:, 0]
        if self.config.kind == "light":
            # One context may stand for all spans.
            scores += jnp.sum(projected["span"] * projected["context"], axis=-1) * self.config.head_width**-0.5
        standard = params["standard"]["scores"]
        return standard["mean"] + standard["deviation"] * scores

    def score_vectors(self, params: Params, vectors: dict[Part, Float[Array, "b e"]]) -> Float[Array, " b"]:
        """`project` and `score`."""
        return self.score(params, {part: self.project(params, part, vectors[part]) for part in self.parts})

    def encoder_flops_per_token(self, num_tokens: int) -> float:
        """Operations of the encoder for one of so many tokens that are read together (`models/flops.py`)."""
        return forward_flops_per_token(dataclasses.replace(self.encoder_config, window_length=num_tokens), 0)
