"""Our own decoders for Hugging Face's transformers, which reads them with `torch_model.py` in their folder."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from meliad_like.conversion.parameters import Place, to_tensors
from meliad_like.errors import UserError
from meliad_like.mixers.base import MIXERS, Shape
from meliad_like.mixers.gated_delta_rule import GatedDeltaRule
from meliad_like.mixers.positions import POSITIONS, Infused, Rotary
from meliad_like.mixers.recurrent_states import RecurrentStates
from meliad_like.mixers.sliding_window import SlidingWindow, WindowAttention
from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.layer import LAYERS
from meliad_like.models.model import Model

TORCH_MODEL = Path(__file__).with_name("torch_model.py")
"""The model in PyTorch. Not imported, because PyTorch is not a requirement."""
SAME = (
    *("model_width", "num_heads", "head_size", "feedforward_width", "feedforward_bias", "window_length"),
    "mask_empty_cache",
)
"""The fields of `DecoderConfig` that config.json has, too."""
MIXER_SETTINGS: dict[type, Any] = {
    SlidingWindow: lambda mixer, shape: {},
    RecurrentStates: lambda mixer, shape: {name: getattr(mixer, name) for name in ("num_states", "gate", "cell")},
    GatedDeltaRule: lambda mixer, shape: {
        **dict(zip(("num_heads", "value_size"), mixer.value_shape(shape))),
        "conv_length": mixer.conv_length,
    },
}
"""The mixers that `torch_model.py` has, and the arguments of their classes there."""
MODULES = {
    "embedding": "embedding/weight",
    "/heads/": "/",
    "feedforward/network": "feedforward",
    "feedforward/norm": "feedforward_norm",
    "cell/query": "state_reader/query",
    "cell/attention_scale": "state_reader/attention_scale",
    "cell/cross_": "cross_reader/",
    "cell/": "",
}
"""Their names for our modules, where these differ; the first ones are replaced first."""
# Not a limit of the model. Tools such as the lm-evaluation-harness cut longer texts, and by default after 2,048 tokens.
MAX_POSITIONS = 1_000_000


def check_decoder(config: Any, owner: str | Path) -> None:
    """Raises a UserError if the model has a part that `torch_model.py` lacks."""
    parts = []
    if not isinstance(config, DecoderConfig):
        parts = [f"a {type(config).__name__} model"]
    else:
        parts += [f"layers of the kind {LAYERS.name_of(kind)}" for kind in config.layer_kinds]
        parts += [MIXERS.name_of(mixer) for mixer in config.mixers if type(mixer) not in MIXER_SETTINGS]
        parts += [config.needs_segments] if config.needs_segments else []
        parts += [f"positions of the kind {POSITIONS.name_of(config.position)}"] * isinstance(config.position, Infused)
    if parts:
        covered = ", ".join(map(MIXERS.name_of, (mixer() for mixer in MIXER_SETTINGS)))
        raise UserError(
            f"{owner} has {' and '.join(parts)}, which transformers can't have from us: only pretrained models and "
            f"decoders of {covered} go there; convert stablehlo takes others"
        )


def to_huggingface_decoder(model: Model, params: Any, end_of_document: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contents of config.json, and the tensors by their names in `torch_model.py`."""
    config = model.config
    assert isinstance(config, DecoderConfig)
    shape, position = config.shape, config.position
    settings = {
        "model_type": "meliad_like",
        "architectures": ["MeliadLikeForCausalLM"],
        "auto_map": {
            "AutoConfig": "torch_model.MeliadLikeConfig",
            "AutoModelForCausalLM": "torch_model.MeliadLikeForCausalLM",
        },
        "dtype": "float32",
        "vocab_size": model.vocabulary_size,
        "eos_token_id": end_of_document,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
        **{name: getattr(config, name) for name in SAME},
        "logit_scale": config.model_width**-0.5 if config.logit_scale is None else config.logit_scale,
        # The angle by which a place turns the first pair of a head; 0: not.
        "rotary_angle": {"1": 1.0, "pi": math.pi}[position.unit] if isinstance(position, Rotary) else 0.0,
        "layers": [_layer_settings(shape, index) for index in range(config.total_layers)],
    }
    tensors = {name: x for name, x in to_tensors(_place, params).items() if ".position." not in name}
    return settings, tensors | _biases(model, params)


def _layer_settings(shape: Shape, index: int) -> dict[str, Any]:
    mixers = shape.layers[index]
    return {
        "mixers": {MIXERS.name_of(mixer): MIXER_SETTINGS[type(mixer)](mixer, shape) for mixer in mixers},
        "width": sum(mixer.width(shape) for mixer in mixers),
        "feedforward": index in shape.feedforward_layers,
    }


def _place(path: str) -> Place:
    """The place of one of our parameters."""
    if match := re.fullmatch(r"(.*gated_delta_rule/)(query|key|value)(/kernel|_filter)", path):
        owner, part, leaf = match.groups()
        name = {"/kernel": "inputs", "_filter": "filters"}[leaf]
        return Place(owner.replace("/", ".") + name, part=("query", "key", "value").index(part))
    for ours, theirs in MODULES.items():
        path = path.replace(ours, theirs)
    module, _, leaf = path.replace("/", ".").rpartition(".")
    return Place(f"{module}.{'weight' if leaf in ('kernel', 'scale') else leaf}", transposed=leaf == "kernel")


def _biases(model: Model, params: Any) -> dict[str, np.ndarray]:
    """The biases by distance, [h, w], of all windows, whatever they are computed from."""
    module, shape, biases = model.bind(params), model.config.shape, {}
    for i, layer in enumerate(module.layers):
        for name, mixer in layer.mixers.items():
            is_window = isinstance(mixer, WindowAttention)
            window = mixer if is_window else getattr(mixer, "window", None)
            if window is not None:
                bias = window.heads.position.bias(shape.num_heads, shape.window_length)
                biases[f"layers.{i}.mixers.{name}.{'' if is_window else 'window.'}bias"] = np.asarray(bias)
    return biases
