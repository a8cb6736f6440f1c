"""A selector: a model that predicts how much a span of the distant past helps to predict the next tokens.

It predicts the gain of equation 2 of Ancient History Language Models (Koncel-Kedziorski and Smith 2021), in nats, and
has a pretrained decoder as its encoder (section 2): it reads `[span; context]`, and the last token's vector goes
through Linear, ReLU, Linear.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from meliad_like.errors import UserError
from meliad_like.families.pretrained.config import PretrainedConfig
from meliad_like.history.settings import SelectorConfig
from meliad_like.layers.basic import fan_in
from meliad_like.models.model import Model

Params = dict[str, Any]


def encoder_config(config: SelectorConfig, pretrained: PretrainedConfig, text_length: int) -> PretrainedConfig:
    """The config of the decoder in a selector that reads at most this number of tokens at once. Raises a UserError if
    the decoder has fewer layers or positions."""
    if config.encoder_layers > pretrained.num_layers:
        layers = f"the {pretrained.num_layers} layers of the pretrained model"
        raise UserError(f"SelectorConfig.encoder_layers={config.encoder_layers} is more than {layers}")
    return dataclasses.replace(
        pretrained,
        num_layers=config.encoder_layers or pretrained.num_layers,
        window_length=text_length,
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
    return used | {"layers": {i: params["layers"][i] for i in range(config.num_layers)}}


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
    def axes(self) -> Params:
        """The logical axes of the parameters of `init`."""
        head = jax.tree.map(lambda x: (None,) * x.ndim, jax.eval_shape(self.init, jax.random.key(0))["head"])
        return {"encoder": self.encoder.axes, "head": head}

    @property
    def kinds(self) -> Params:
        """The kind of each parameter of `init` (`layers.basic.Kind`)."""
        linear = {"kernel": "matrix", "bias": "bias"}
        return {"encoder": self.encoder.kinds, "head": {"hidden": linear, "output": linear}}

    def init(self, key: PRNGKeyArray) -> Params:
        """Fresh parameters, float32: those of the `head`, and zeros for the decoder as `encoder`."""
        width, hidden = self.encoder_config.model_width, self.config.head_width
        keys = jax.random.split(key)

        def linear(key: PRNGKeyArray, size_in: int, size_out: int) -> Params:
            return {"kernel": fan_in(key, (size_in, size_out), jnp.float32), "bias": jnp.zeros(size_out)}

        encoder = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), self.encoder.abstract_params)
        head = {"hidden": linear(keys[0], width, hidden), "output": linear(keys[1], hidden, 1)}
        return {"encoder": encoder, "head": head}

    def score(
        self, params: Params, tokens: Int[Array, "b t"], length: Int[Array, " b"], key: PRNGKeyArray | None = None
    ) -> Float[Array, " b"]:
        """The scores of texts, float32, in nats.

        Args:
            length: number of tokens of each text, at least 1; attention is causal, so padding changes nothing.
            key: of the dropout in training; None: no dropout.
        """
        module, head = self.encoder.bind(params["encoder"]), params["head"]
        hidden = module.read_window(tokens, dropout_key=key)[-1]
        vectors = module.final_norm(hidden[jnp.arange(len(length)), length - 1]).astype(jnp.float32)
        values = jax.nn.relu(vectors @ head["hidden"]["kernel"] + head["hidden"]["bias"])
        return (values @ head["output"]["kernel"] + head["output"]["bias"])[:, 0]

    def flops_per_token(self, num_tokens: int) -> float:
        """Operations of the encoder per token, when `num_tokens` are read together (`layers/flops.py`)."""
        return dataclasses.replace(self.encoder_config, window_length=num_tokens).flops(0).forward


score = jax.jit(Selector.score, static_argnums=0)
"""`Selector.score`, compiled."""
