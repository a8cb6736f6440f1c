"""Checkpoints of fairseq's `transformer_lm_wiki103`, with adaptive input and softmax, and of the Shortformer's authors.

Fairseq's kernels are [out, in]. The softmax's copies of parameters shared with the embedding (`tie_adaptive_weights`,
`tie_adaptive_proj`) are compared and left out.
"""

import argparse
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from meliad_like.config import RunConfig
from meliad_like.conversion.parameters import Place, fill_parameters, places_by_module
from meliad_like.errors import UserError, reading
from meliad_like.models.model import Model
from meliad_like.models.shortformer import ShortformerConfig
from meliad_like.run.opening import write_checkpoint

_in_layers = places_by_module(
    {
        "attention_norm": "layers.{}.self_attn_layer_norm",
        "query": "layers.{}.self_attn.q_proj",
        "key": "layers.{}.self_attn.k_proj",
        "value": "layers.{}.self_attn.v_proj",
        "output": "layers.{}.self_attn.out_proj",
        "feedforward_norm": "layers.{}.final_layer_norm",
        "feedforward_hidden": "layers.{}.fc1",
        "feedforward_output": "layers.{}.fc2",
    }
)
# Buffers without learned numbers: versions of modules, and tensors that only mark a device.
_BUFFER = re.compile(r"(.+\.)?(version|_float_tensor)")


def place(path: str) -> Place:
    """The place, without its `decoder.`, of our parameter, for example of `layers/0/key/kernel`."""
    if match := re.fullmatch(r"vocabulary/bands/(\d+)/(embedding|projection)", path):
        projection = match[2] == "projection"
        return Place(f"embed_tokens.embeddings.{match[1]}.{int(projection)}.weight", transposed=projection)
    clusters = Place("adaptive_softmax.head.class_proj.weight", transposed=True)
    return clusters if path == "vocabulary/clusters/kernel" else _in_layers(path)


def from_fairseq(theirs: Mapping[str, np.ndarray], template: dict[str, Any]) -> dict[str, Any]:
    """Our parameter tree, in the shapes of `template`, filled from fairseq's arrays by their names."""
    theirs = {name.removeprefix("decoder."): array for name, array in theirs.items()}
    learned = {name for name in theirs if not _BUFFER.fullmatch(name)}
    for name in sorted(learned):
        if (shared := _shared_with(name)) in theirs:
            if not np.array_equal(theirs[name], theirs[shared]):
                raise UserError(f"decoder.{name} differs from decoder.{shared}: only tied softmaxes are supported")
            learned.discard(name)
    return fill_parameters(template, learned, place, theirs.__getitem__, "the checkpoint")


def _shared_with(name: str) -> str | None:
    """The array of the embedding, a table or a projection of a band, of which a softmax's array is a copy."""
    if name == "adaptive_softmax.head.word_proj.weight":
        return "embed_tokens.embeddings.0.0.weight"
    if match := re.fullmatch(r"adaptive_softmax\.tail\.(\d+)\.([02])\.weight", name):
        return f"embed_tokens.embeddings.{int(match[1]) + 1}.{int(match[2] == '0')}.weight"
    return None


def read_fairseq(path: str | Path) -> dict[str, np.ndarray]:
    """Reads the parameters of a fairseq checkpoint (`.pt`), float32, by name. No code in the file is executed."""
    try:
        import torch  # type: ignore[import-not-found]  # an extra
    except ImportError:
        raise UserError("reading fairseq's checkpoints needs PyTorch: pip install 'meliad_like[fairseq]'") from None
    damaged = pickle.UnpicklingError, RuntimeError, EOFError
    settings = torch.serialization.safe_globals([argparse.Namespace])  # of the training, which the file also contains
    with reading(path, "checkpoint of weights and settings", *damaged), settings:
        saved = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(saved, dict) or "model" not in saved:
        raise UserError(f"{path} is not a checkpoint of fairseq: there is no model in it")
    return {name: tensor.float().numpy() for name, tensor in saved["model"].items()}


def convert_from_fairseq(path: str | Path, run: RunConfig, folder: str | Path) -> None:
    """Writes our checkpoint folder at step 0, for evaluation, generation and fine-tuning."""
    if not isinstance(run.model, ShortformerConfig):
        raise UserError("a checkpoint of fairseq is a Shortformer: add --gin_file=shortformer/shortformer.gin")
    if run.vocabulary.trained:
        raise UserError("the checkpoint has the words of its own dict.txt: set FileVocabularyConfig.model_file to it")
    vocabulary = run.vocabulary.make()
    params = from_fairseq(read_fairseq(path), Model(run.model, vocabulary.size).abstract_params)
    write_checkpoint(folder, params, run, vocabulary)
