"""Our own decoders for Hugging Face's transformers, which reads them with `torch_model.py` in their folder."""

import dataclasses
import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from meliad_like.conversion.parameters import NEWER_FIELDS
from meliad_like.errors import UserError
from meliad_like.layers.feedforward import FEEDFORWARDS, PlainFeedForward
from meliad_like.mixers.base import MIXERS, DecoderShape
from meliad_like.mixers.gated_delta_rule import GatedDeltaRule
from meliad_like.mixers.positions import POSITIONS, Rotary
from meliad_like.mixers.recurrent_states import RecurrentStates
from meliad_like.mixers.sliding_window import SlidingWindow, TokenHeads
from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.model import Model
from meliad_like.registry import default_of
from meliad_like.training.checkpoints import named_arrays
from meliad_like.vocabularies.base import Vocabulary
from meliad_like.vocabularies.sentencepiece import SentencePieceVocabulary

MODEL, TOKENIZER = (Path(__file__).with_name(name) for name in ("torch_model.py", "torch_tokenizer.py"))
"""The files that are copied into the folder. They are not imported, because PyTorch is not a requirement."""
SIZES = ("model_width", "num_heads", "head_size", "feedforward_width", "window_length")
POSITION_NAMES = ("none", "t5", "fourier", "alibi", "network", "orthogonal", "rotary")
"""Biases by distance, whatever they are computed from, and rotations."""
MIXER_SETTINGS: dict[type, Any] = {
    SlidingWindow: lambda mixer, shape: {},
    RecurrentStates: lambda mixer, shape: {name: getattr(mixer, name) for name in ("num_states", "gate", "cell")},
    GatedDeltaRule: lambda mixer, shape: {
        "num_heads": mixer.sizes(shape).heads,
        "value_size": mixer.sizes(shape).value_size,
        "conv_length": mixer.conv_length,
    },
}
"""The mixers that `torch_model.py` has, and the arguments of their classes there."""
ONLY_DEFAULTS = [
    *((DecoderConfig, name) for name in NEWER_FIELDS),
    (PlainFeedForward, "activation"),
    *((GatedDeltaRule, name) for name in ("num_key_heads", "key_size", "largest_strength", "norm_epsilon")),
]
"""Fields that `torch_model.py` does not read."""
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


def check_decoder(config: Any, owner: str | Path) -> None:
    """Raises a UserError if the model has a part that `torch_model.py` lacks."""
    if not isinstance(config, DecoderConfig):
        parts = [f"a {type(config).__name__} model"]
    else:
        parts = [config.traits.needs_segments] if config.traits.needs_segments else []
        parts += [
            f"DecoderConfig.{name}"
            for name in ("doubled_inputs", "norms_after", "norms_around")
            if getattr(config, name)
        ]
        parts += [MIXERS.name_of(mixer) for mixer in config.mixers if type(mixer) not in MIXER_SETTINGS]
        parts += [FEEDFORWARDS.name_of(kind) for kind in config.feedforwards if type(kind) is not PlainFeedForward]
        for kind, name in ONLY_DEFAULTS:
            parts_of = (config, *config.mixers, *config.feedforwards)
            values = [getattr(x, name) for x in parts_of if type(x) is kind]
            default = next(default_of(field) for field in dataclasses.fields(kind) if field.name == name)
            parts += [f"{kind.__name__}.{name}={value!r}" for value in values if value != default]
        if (position := POSITIONS.name_of(config.position)) not in POSITION_NAMES:
            parts.append(f"positions of the kind {position}")
    if parts:
        covered = ", ".join(name for name, mixer in MIXERS.items() if mixer in MIXER_SETTINGS)
        raise UserError(
            f"{owner} has {' and '.join(parts)}: only decoders of {covered} and pretrained models are written for "
            "transformers; convert stablehlo writes others"
        )


def to_huggingface_decoder(model: Model, params: Any, end_of_document: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contents of config.json, and the tensors by their names in `torch_model.py`."""
    config, module = model.config, model.bind(params)
    assert isinstance(config, DecoderConfig)
    classes = {"AutoConfig": "MeliadLikeConfig", "AutoModelForCausalLM": "MeliadLikeForCausalLM"}
    settings = {
        "model_type": "meliad_like",
        "architectures": ["MeliadLikeForCausalLM"],
        "auto_map": {name: f"torch_model.{name_there}" for name, name_there in classes.items()},
        "dtype": "float32",
        "vocab_size": model.vocabulary_size,
        "eos_token_id": end_of_document,
        # The model has no limit, but the lm-evaluation-harness cuts longer texts, and by default after 2,048 tokens.
        "max_position_embeddings": 1_000_000,
        "tie_word_embeddings": False,
        **{name: getattr(config, name) for name in (*SIZES, "feedforward_bias", "mask_empty_cache")},
        "logit_scale": module.logit_scale,
        # The angle by which a place turns the first pair of a head's channels; 0: none.
        "rotary_angle": {"1": 1.0, "pi": math.pi}[config.position.unit] if isinstance(config.position, Rotary) else 0.0,
        "layers": [_layer_settings(config.shape, index) for index in range(config.total_layers)],
    }
    tensors = {name: x for name, x in _tensors(params).items() if ".position." not in name}
    # The biases by distance, [h, w], of all windows, whatever they are computed from.
    for path, node in nnx.iter_graph(module):
        if isinstance(node, TokenHeads):
            name = _name("/".join(map(str, (*path, "bias"))))
            tensors[name] = np.asarray(node.position.bias(node.num_heads, node.w))
    return settings, tensors


def _layer_settings(shape: DecoderShape, index: int) -> dict[str, Any]:
    mixers = {MIXERS.name_of(mixer): MIXER_SETTINGS[type(mixer)](mixer, shape) for mixer in shape.layers[index]}
    width = sum(mixer.width(shape) for mixer in shape.layers[index])
    return {"mixers": mixers, "width": width, "feedforward": shape.feedforwards[index] is not None}


def _tensors(params: Any) -> dict[str, Any]:
    """The tensors by name: linear maps are [out, in], and of the delta rule queries, keys and values side by side."""
    tensors, parts = {}, defaultdict(dict)
    for path, leaf in named_arrays(params).items():
        if match := re.fullmatch(r"(.*gated_delta_rule/)(query|key|value)(/kernel|_filter)", path):
            parts[match[1] + ("inputs" if match[3] == "/kernel" else "filters")][match[2]] = leaf
        else:
            tensors[_name(path)] = leaf.T if path.endswith("/kernel") else leaf
    for path, of in parts.items():
        tensors[_name(path)] = np.concatenate([of["query"], of["key"], of["value"]], axis=-1)
    return tensors


def _name(path: str) -> str:
    """The name of one of our parameters."""
    for ours, theirs in MODULES.items():
        path = path.replace(ours, theirs)
    module, _, leaf = path.replace("/", ".").rpartition(".")
    return f"{module}.{'weight' if leaf in ('kernel', 'scale') else leaf}"


def tokenizer_settings(vocabulary: Vocabulary) -> dict[str, Any] | None:
    """The contents of tokenizer_config.json with `torch_tokenizer.py`; None for a vocabulary that it can't read."""
    if not (isinstance(vocabulary, SentencePieceVocabulary) and vocabulary.lossless and vocabulary.end_piece):
        return None
    name, end = "MeliadLikeTokenizer", vocabulary.end_piece
    return {"tokenizer_class": name, "auto_map": {"AutoTokenizer": [f"torch_tokenizer.{name}", None]}, "eos_token": end}
