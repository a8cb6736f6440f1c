"""Folders of published models, as Hugging Face's transformers writes them: opened, and written again.

A model is opened as our decoder, or as a pretrained decoder, which reads by windows.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from meliad_like.config import Changes, RunConfig, bound_values, fit, parse
from meliad_like.conversion.parameters import vocabulary_of
from meliad_like.conversion.published.family import FAMILIES, AnyConfig, Family, Fields, read_parameters, to_tensors
from meliad_like.conversion.published.windows import (
    RECURRENCE_NAME,
    config_json,
    read_recurrence,
    with_recurrence,
    write_recurrence,
)
from meliad_like.conversion.tensor_files import (
    CONFIG_NAME,
    GENERATION_NAME,
    TENSORS_NAME,
    check_tied,
    read_tensor,
    save_tensors,
    tensor_files,
)
from meliad_like.data.readers import LanesReaderConfig, WindowsReaderConfig
from meliad_like.errors import UserError
from meliad_like.families.pretrained.config import PretrainedConfig
from meliad_like.models.config import ActivationDtype
from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.model import Model
from meliad_like.resumable import read_object, write_json
from meliad_like.run.opening import OpenedCheckpoint
from meliad_like.vocabularies.base import SETTINGS_NAME, VocabularyConfig, saved_vocabulary_config
from meliad_like.vocabularies.token_ids import TokenIdsVocabularyConfig
from meliad_like.vocabularies.tokenizers import TOKENIZER_NAME, TokenizersVocabularyConfig

SEGMENT = 2048
"""The default number of tokens of a segment of a decoder."""


class Described(NamedTuple):
    """The model that a config.json describes."""

    config: AnyConfig
    vocabulary_size: int
    family: Family
    fields: Fields


def described(saved: Mapping[str, Any], owner: str, *, decoder: bool = False) -> Described:
    """The model of a config.json; `decoder`: in any case as our decoder."""
    kind = saved.get("model_type")
    # A list, because the file may have something that is not hashable.
    if kind not in list(FAMILIES):
        raise UserError(f"{owner}: model_type {kind!r} is not one of {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    fields = Fields(family.normal_form(dict(saved), owner), owner)
    [size] = fields.sizes("vocab_size")
    try:
        windows = family.by_windows
        config = family.decoder(fields) if decoder or windows is None else windows(fields)
    except UserError as error:
        raise error if owner in str(error) else UserError(f"{owner}: {error}") from None
    # Places read fields, too.
    family.places(fields, config)
    fields.check_all_read()
    if isinstance(config, DecoderConfig):
        config = dataclasses.replace(config, published=json.dumps(fields.saved, sort_keys=True))
    return Described(config, size, family, fields)


def _params_of(folder: Path, model: Described, dtype: ActivationDtype) -> dict[str, Any]:
    """The parameters in a folder; those of a recurrence only if it was saved there."""
    config, family, files = model.config, model.family, tensor_files(folder)
    names = {ours: theirs for theirs in files if (ours := family.name(theirs, config)) is not None}
    again = names.pop("lm_head.weight", None) if config.tied_embedding else None

    def read(name: str) -> np.ndarray:
        return read_tensor(files[names[name]], names[name])

    template = Model(config, model.vocabulary_size).abstract_params_in(dtype)
    recurrence = template.pop("recurrence", None)
    params = read_parameters(family, family.places(model.fields, config), template, names, read, str(folder))
    check_tied(files, again, params["embedding"], folder)
    if recurrence is not None and (folder / RECURRENCE_NAME).exists():
        params["recurrence"] = read_recurrence(folder / RECURRENCE_NAME, recurrence)
    return params


def config_of_published(folder: str | Path, changes: Changes) -> tuple[RunConfig, Described]:
    """The config with which a published model is opened, and the model.

    The folder determines the decoder, and its recurrence, if it has one; the changes may set how it reads, documents
    and vocabulary. Without a tokenizer in the folder, the vocabulary has token ids alone.
    """

    def bound(key: str, default: Any) -> Any:
        """The value that the changes bind; the default where none of its type is."""
        value = changes.bindings[key].value if key in changes.bindings else default
        return value if type(value) is type(default) else default

    folder = Path(folder)
    path, as_decoder = folder / CONFIG_NAME, bound("RunConfig.model", "") == "decoder"
    model = described(read_object(path), str(path), decoder=as_decoder)
    if isinstance(model.config, PretrainedConfig) and (recurrence := folder / RECURRENCE_NAME).exists():
        model = model._replace(config=with_recurrence(recurrence, model.config))
    config = model.config
    # Any block length that is asked for has whole segments.
    window = bound(f"{type(config).__name__}.window_length", config.window_length)
    blocks = max(SEGMENT // window, 1) if isinstance(config, DecoderConfig) else 1
    segment = bound("ReaderConfig.segment_length", window * blocks)
    recurrent = isinstance(config, PretrainedConfig) and config.summary is not None
    start = dataclasses.replace(
        parse(),
        model=dataclasses.replace(config, window_length=window),
        vocabulary=_vocabulary(folder, model.fields.saved, model.vocabulary_size),
        data=(WindowsReaderConfig if recurrent else LanesReaderConfig)(segment_length=segment, tokens_per_step=segment),
    )
    run = changes(start)
    _check_same(config, run.model, str(folder))
    return run, model


def open_published(folder: str | Path, changes: Changes, dtype: ActivationDtype = "float32") -> OpenedCheckpoint:
    """Opens a published model at step 0 (`config_of_published`), with its matrices in this dtype."""
    run, model = config_of_published(folder, changes)
    vocabulary = vocabulary_of(run, model.vocabulary_size, folder)
    params = _params_of(Path(folder), model, dtype)
    return OpenedCheckpoint(run, Model(run.model, vocabulary.size), params, vocabulary, 0)


def _check_same(config: AnyConfig, model: Any, owner: str) -> None:
    """Raises a UserError if a model is not this one, or another one than in how it reads."""
    if not model.extends(config):
        old, new = bound_values(config), bound_values(model)
        names = model.determined(config) if type(model) is type(config) else ["RunConfig.model"]
        raise UserError(
            f"{names[0]} = {new.get(names[0], type(model).__name__)!r}, but {owner} has {old.get(names[0])!r}"
        )


def write_published(opened: OpenedCheckpoint, folder: Path, dtype: ActivationDtype = "float32") -> None:
    """Writes a pretrained decoder, or a decoder that was opened from a published model, into an existing folder, with
    tensors of this dtype and without its tokenizer. A recurrence, which config.json can't express, is saved in a file
    of its own.

    A tensor may differ from the one that was read if a constant was folded in: by the last bit in float32, and where 1
    was added to numbers below 1e-4 by 6e-8 in any dtype.
    """
    config, params, owner = opened.model.config, dict(opened.params), f"config.json of {folder}"
    recurrence = params.pop("recurrence", None)
    if isinstance(config, PretrainedConfig):
        saved = config_json(config, opened.model.vocabulary_size, opened.vocabulary.end_of_document)
        if recurrence is not None:
            write_recurrence(config, recurrence, folder)
    else:
        assert isinstance(config, DecoderConfig)
        saved = json.loads(config.published)
    model = described(saved, owner, decoder=isinstance(config, DecoderConfig))
    _check_same(model.config, config, owner)
    write_json(folder / CONFIG_NAME, saved | {"dtype": dtype})
    tensors = to_tensors(model.family, model.family.places(model.fields, model.config), params)
    # One after the other: the rounded ones take the place of the others.
    for name, tensor in tensors.items():
        tensors[name] = tensor.astype(jnp.dtype(dtype), copy=False)
    save_tensors(tensors, folder / TENSORS_NAME, {"format": "pt"})


def _vocabulary(folder: Path, saved: Mapping[str, Any], size: int) -> VocabularyConfig:
    """The vocabulary of a folder: ours, its tokenizer's with the token that it puts before texts and ids that are never
    written up to `size`, or ids alone, of which one ends documents if config.json says so."""
    if (folder / SETTINGS_NAME).exists():
        return saved_vocabulary_config(folder)
    path = folder / CONFIG_NAME
    if (generation := folder / GENERATION_NAME).exists() and (of_text := read_object(generation)).get("eos_token_id"):
        path, saved = generation, of_text
    ends = saved.get("eos_token_id")
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    # An id beyond the table can't be read or written.
    first, *others = [end for end in fit(ends, tuple[int, ...], f"{path}: eos_token_id") if 0 <= end < size] or [None]
    if any((folder / name).exists() for name in (TOKENIZER_NAME, "vocab.json")):
        stops = () if first is None else (first, *others)
        begin = token_before_texts(folder)
        sizes = {"model_file": str(folder), "size_multiple": size}
        return TokenizersVocabularyConfig(**sizes, begin_token=begin, stop_tokens=stops)
    return TokenIdsVocabularyConfig(num_tokens=size, end_token=first, stop_tokens=tuple(others))


def token_before_texts(folder: Path) -> str:
    """The token that the tokenizer.json in a folder puts before every text; "": none, or more than one."""
    path = folder / TOKENIZER_NAME
    last_step = (read_object(path) if path.exists() else {}).get("post_processor") or {}
    for step in last_step.get("processors", [last_step]):
        match step.get("single"):
            case [{"SpecialToken": {"id": token}}, {"Sequence": _}, *_]:
                return token
    return ""
