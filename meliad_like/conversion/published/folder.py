"""Folders of published models, as Hugging Face's transformers writes them: opened as our decoder, and written again."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from meliad_like.config import Changes, RunConfig, bound_values, fit, parse
from meliad_like.conversion.parameters import vocabulary_of
from meliad_like.conversion.published.family import FAMILIES, Family, Fields, Places, read_parameters, to_tensors
from meliad_like.conversion.tensor_files import (
    CONFIG_NAME,
    TENSORS_NAME,
    check_tied,
    read_tensor,
    save_tensors,
    tensor_files,
)
from meliad_like.data.readers import LanesReaderConfig
from meliad_like.data.token_ids_vocabulary import TokenIdsVocabularyConfig
from meliad_like.data.tokenizers_vocabulary import TOKENIZER_NAME, TokenizersVocabularyConfig
from meliad_like.data.vocabulary import SETTINGS_NAME, VocabularyConfig, saved_vocabulary_config
from meliad_like.errors import UserError
from meliad_like.models.config import ActivationDtype
from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.model import Model
from meliad_like.remote import any_path
from meliad_like.resumable import read_object, write_json
from meliad_like.run.opening import OpenedCheckpoint

SEGMENT = 2048
"""The default number of tokens of a segment."""


def family_of(folder: epath.PathLike, changes: Changes) -> Family | None:
    """The family as which a folder is opened with these changes; None if it is of another format."""
    path = any_path(folder) / CONFIG_NAME
    family = FAMILIES.get(json.loads(path.read_text()).get("model_type")) if path.exists() else None
    by_windows = family is not None and family.also_by_windows and changes.value("RunConfig.model", "") != "decoder"
    return None if by_windows else family


def config_of_published(folder: str | Path, changes: Changes) -> tuple[RunConfig, Family, Places, int]:
    """The config with which a published model is opened, its family, the places of its parameters, and the number of
    its tokens.

    The folder determines the decoder; the changes may set how it reads, documents and vocabulary. Without a tokenizer
    in the folder, the vocabulary has token ids alone.
    """
    folder = Path(folder)
    owner = str(folder / CONFIG_NAME)
    family, saved = normal_form(read_object(folder / CONFIG_NAME), owner)
    decoder, places, size = described(family, saved, owner)
    # Any block length that is asked for has whole segments.
    window = changes.value("DecoderConfig.window_length", decoder.window_length)
    segment = changes.value("ReaderConfig.segment_length", window * max(SEGMENT // window, 1))
    start = dataclasses.replace(
        parse(),
        model=dataclasses.replace(decoder, window_length=window),
        vocabulary=_vocabulary(folder, saved, size),
        data=LanesReaderConfig(segment_length=segment, tokens_per_step=segment),
    )
    run = changes(start)
    _check_same(decoder, run.model, str(folder))
    return run, family, places, size


def open_published(folder: str | Path, changes: Changes, dtype: ActivationDtype) -> OpenedCheckpoint:
    """Opens a published model at step 0 (`config_of_published`), with its matrices in this dtype."""
    folder = Path(folder)
    run, family, places, size = config_of_published(folder, changes)
    vocabulary = vocabulary_of(run, size, folder)
    model, files = Model(run.model, vocabulary.size), tensor_files(folder)
    assert isinstance(run.model, DecoderConfig)
    names = {ours: theirs for theirs in files if (ours := family.name(theirs, run.model)) is not None}
    again = names.pop("lm_head.weight", None) if run.model.tied_embedding else None

    def read(name: str) -> np.ndarray:
        return read_tensor(files[names[name]], names[name])

    params = read_parameters(family, places, model.abstract_params_in(dtype), names, read, str(folder))
    check_tied(files, again, params["embedding"], folder)
    return OpenedCheckpoint(run, model, params, vocabulary, 0)


def _check_same(decoder: DecoderConfig, model: Any, owner: str) -> None:
    """Raises a UserError if a model is not this decoder, or another one than in how it reads."""
    if not isinstance(model, DecoderConfig) or not model.extends(decoder):
        old, new = bound_values(decoder), bound_values(model)
        names = model.determined(decoder) if isinstance(model, DecoderConfig) else ["RunConfig.model"]
        raise UserError(
            f"{names[0]} = {new.get(names[0], type(model).__name__)!r}, but {owner} has {old.get(names[0])!r}"
        )


def write_published(opened: OpenedCheckpoint, folder: Path) -> None:
    """Writes a decoder that was opened from a published model into an existing folder, without its tokenizer."""
    model = opened.run.model
    assert isinstance(model, DecoderConfig)
    owner = f"the config.json of {type(model).__name__}.published"
    family, saved = normal_form(json.loads(model.published), owner)
    decoder, places, _ = described(family, saved, owner)
    _check_same(decoder, model, owner)
    write_json(folder / CONFIG_NAME, saved | {"dtype": "float32"})
    save_tensors(to_tensors(family, places, opened.params), folder / TENSORS_NAME, {"format": "pt"})


def normal_form(saved: dict[str, Any], owner: str) -> tuple[Family, dict[str, Any]]:
    """The family of a config.json, and the form in which the family reads it."""
    saved = FAMILIES[saved["model_type"]].normal_form(saved, owner)
    return FAMILIES[saved["model_type"]], saved


def described(family: Family, saved: dict[str, Any], owner: str) -> tuple[DecoderConfig, Places, int]:
    """The decoder of a config.json, the places of its parameters, and the number of its tokens."""
    fields = Fields(saved, owner)
    [size] = fields.sizes("vocab_size")
    try:
        decoder = family.decoder(fields)
    except UserError as error:
        raise error if owner in str(error) else UserError(f"{owner}: {error}") from None
    places = family.places(fields, decoder)
    fields.check_all_read()
    published = json.dumps(saved, sort_keys=True)
    return dataclasses.replace(decoder, published=published), places, size


def _vocabulary(folder: Path, saved: dict[str, Any], size: int) -> VocabularyConfig:
    """The vocabulary of a folder: ours, its tokenizer's with ids that are never written up to `size`, or ids alone, of
    which one ends documents if config.json says so."""
    if (folder / SETTINGS_NAME).exists():
        return saved_vocabulary_config(folder)
    if any((folder / name).exists() for name in (TOKENIZER_NAME, "vocab.json")):
        return TokenizersVocabularyConfig(model_file=str(folder), size_multiple=size)
    end = saved.get("eos_token_id")
    end = end[0] if isinstance(end, list) else end
    if end is not None and not 0 <= fit(end, int, f"{folder / CONFIG_NAME}: eos_token_id") < size:
        # An id beyond the table, which the model can't read or write.
        end = None
    return TokenIdsVocabularyConfig(num_tokens=size, end_token=end)
