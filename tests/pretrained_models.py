"""A tiny GPT-2 and Llama of the pretrained family, and what their windows give."""

import functools
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

from meliad_like.config import read_changes
from meliad_like.conversion.pretrained import export_tokenizer
from meliad_like.conversion.published.family import to_tensors
from meliad_like.conversion.published.folder import described, open_published, write_published
from meliad_like.conversion.published.windows import config_json
from meliad_like.families.pretrained.config import PretrainedConfig
from meliad_like.models.model import Model
from meliad_like.run.opening import OpenedCheckpoint
from meliad_like.vocabularies.base import ByteVocabulary
from meliad_like.vocabularies.token_ids import TokenIdsVocabulary
from meliad_like.vocabularies.tokenizers import TOKENIZER_NAME

FOLDER = Path(__file__).parent / "golden" / "gpt2_tiny"
LLAMA_CONFIG = PretrainedConfig(
    architecture="llama",
    num_layers=2,
    model_width=24,
    num_heads=6,
    num_key_value_heads=2,
    head_size=4,
    feedforward_width=40,
    activation="silu",
    max_positions=32,
    window_length=32,
    norm_epsilon=1e-5,
    rotary_base=1e5,
)


def write_byte_tokenizer(folder: Path) -> None:
    """Adds a tokenizer of bytes to a folder of transformers."""
    exported = export_tokenizer(ByteVocabulary())
    assert exported is not None
    (folder / TOKENIZER_NAME).write_text(exported[0])


@functools.partial(jax.jit, static_argnums=0)
def read(model, params, tokens, first):
    if "positions" in params:
        params = params | {"positions": jnp.roll(params["positions"], -first, axis=0)}
    module = model.bind(params)
    outputs = module.read_window(tokens)
    hidden = module.final_norm(outputs[-1])
    return outputs, hidden, module.logits(hidden)


class Pretrained(NamedTuple):
    """A model without a vocabulary."""

    config: PretrainedConfig
    vocabulary_size: int
    params: dict


def read_published(folder):
    opened = open_published(folder, read_changes())
    return Pretrained(opened.run.model, opened.model.vocabulary_size, opened.params)


def write_windows(pretrained, end_of_document, folder):
    config, size, params = pretrained
    vocabulary = TokenIdsVocabulary(size, end_of_document)
    write_published(OpenedCheckpoint(None, Model(config, size), params, vocabulary, 0), Path(folder))


def tensors(config, params):
    """Our parameters, or their gradients, as the tensors of a file."""
    decoder = {name: value for name, value in params.items() if name != "recurrence"}
    model = described(config_json(config, 1, 0), "config.json")
    return to_tensors(model.family, model.family.places(model.fields, config), decoder)
