"""Pretrained models: folders of Hugging Face's transformers, read and written without PyTorch."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from etils import epath
from tokenizers import Tokenizer

from meliad_like.config import (
    Changes,
    RunConfig,
    bound_values,
    differences,
    field_types,
    fit,
    parse,
    read_changes,
    to_gin,
    with_changes,
)
from meliad_like.config.saved import GIN_NAME
from meliad_like.conversion import own_decoders
from meliad_like.conversion.parameters import Place, fill_parameters, to_tensors, vocabulary_of
from meliad_like.conversion.pretrained_formats import CONSTANTS, PLACES, from_huggingface, to_huggingface
from meliad_like.conversion.published.family import FAMILIES
from meliad_like.conversion.published.folder import config_of_published, family_of, open_published, write_published
from meliad_like.conversion.tensor_files import (
    CONFIG_NAME,
    INDEX_NAME,
    TENSORS_NAME,
    check_tied,
    opened,
    read_tensor,
    save_tensors,
    tensor_files,
)
from meliad_like.data.readers import LanesReaderConfig, WindowsReaderConfig
from meliad_like.data.tokenizers_vocabulary import (
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
    TokenizersVocabularyConfig,
    export_tokenizer,
)
from meliad_like.data.vocabulary import SETTINGS_NAME, FileVocabularyConfig, Vocabulary, saved_vocabulary_config
from meliad_like.errors import UserError
from meliad_like.models.config import ActivationDtype
from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.model import Model
from meliad_like.models.pretrained.config import DECODER_FIELDS, PretrainedConfig
from meliad_like.models.pretrained.recurrence import WindowSummary
from meliad_like.remote import any_path, from_hub, write_whole
from meliad_like.resumable import parse_json, read_json, read_object, write_json
from meliad_like.run.opening import (
    FOREIGN_FORMATS,
    VOCABULARY_FOLDER,
    OpenedCheckpoint,
    open_checkpoint,
    write_checkpoint,
)

GENERATION_NAME = "generation_config.json"
RECURRENCE_NAME = "recurrence.safetensors"
# The key in that file's metadata of the recurrence's config and the windows with which it was trained.
RECURRENCE_KEY = "WindowSummary"
NO_TOKENIZER = "transformers has no tokenizer like the {} vocabulary"
WINDOW_FIELDS = ("window_length", "overlap")


class Pretrained(NamedTuple):
    """A pretrained model: its config and its parameters."""

    config: PretrainedConfig
    vocabulary_size: int
    params: dict[str, Any]
    """The parameters, on the default device."""


def read_huggingface(folder: str | Path, dtype: ActivationDtype = "float32") -> Pretrained:
    """Reads a model from config.json and `model.safetensors`, or from several files and their index.

    Its matrices are kept in `dtype`.

    The model includes a recurrence that `write_huggingface` has saved in the folder, and its windows.
    """
    folder = Path(folder)
    saved = read_object(folder / CONFIG_NAME)
    config = from_huggingface(saved, str(folder / CONFIG_NAME), tuple(FAMILIES))
    size = fit(saved.get("vocab_size"), int, f"{folder / CONFIG_NAME}: vocab_size")
    files = tensor_files(folder)
    prefix = "transformer." if config.architecture == "gpt2" and "wte.weight" in files else ""
    # A model without its output layer is saved without the prefix.
    names = {prefix + name: name for name in files if not name.endswith(CONSTANTS)}
    again = names.pop("lm_head.weight", None) if config.tied_embedding else None
    template, places = Model(config, size).abstract_params_in(dtype), PLACES[config.architecture]
    params = fill_parameters(
        template, names, places, lambda name: read_tensor(files[names[name]], names[name]), str(folder)
    )
    check_tied(files, again, params["embedding"], folder)
    if (folder / RECURRENCE_NAME).exists():
        config, recurrence = _read_recurrence(folder / RECURRENCE_NAME, config, size, dtype)
        params |= {"recurrence": recurrence}
    return Pretrained(config, size, params)


def write_huggingface(pretrained: Pretrained, end_of_document: int, folder: str | Path) -> None:
    """Writes a model for `transformers` into an existing folder, without the tokenizer.

    A recurrence, which config.json can't express, is saved in a separate file with its fields of the config.
    """
    folder = Path(folder)
    decoder = {name: value for name, value in pretrained.params.items() if name != "recurrence"}
    config = to_huggingface(pretrained.config, pretrained.vocabulary_size, end_of_document)
    tensors = to_tensors(PLACES[pretrained.config.architecture], decoder)
    write_json(folder / CONFIG_NAME, config)
    save_tensors(tensors, folder / TENSORS_NAME, {"format": "pt"})
    if "recurrence" in pretrained.params:
        windows = {name: getattr(pretrained.config, name) for name in WINDOW_FIELDS}
        fields = windows | dataclasses.asdict(pretrained.config.summary)
        metadata = {RECURRENCE_KEY: json.dumps(fields)}
        save_tensors(to_tensors(Place, pretrained.params["recurrence"]), folder / RECURRENCE_NAME, metadata)


def new_folder(path: str | Path) -> Path:
    """Makes a folder for the files of a model; it may exist, but must be empty."""
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is {'not empty' if folder.is_dir() else 'a file'}: choose another --output")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _read_recurrence(
    path: Path, decoder: PretrainedConfig, size: int, dtype: ActivationDtype
) -> tuple[PretrainedConfig, dict[str, Any]]:
    """Reads the recurrence: returns the config with it, and its parameters."""
    with opened(path) as file:
        names, metadata = set(file.keys()), file.metadata() or {}
    saved = parse_json(metadata.get(RECURRENCE_KEY, "null"), f"{path}: {RECURRENCE_KEY}")
    types = {name: field_types(PretrainedConfig)[name] for name in WINDOW_FIELDS} | field_types(WindowSummary)
    if not isinstance(saved, dict) or saved.keys() != types.keys():
        advice = "write it again with convert huggingface --reverse, or remove it to have the decoder alone"
        raise UserError(f"{path} doesn't say what recurrence it is of: {advice}")
    fields = {name: fit(value, types[name], f"{path}: {name}") for name, value in saved.items()}
    windows = {name: fields.pop(name) for name in WINDOW_FIELDS}
    config = dataclasses.replace(decoder, **windows, recurrence=(WindowSummary(**fields),))
    template = Model(config, size).abstract_params_in(dtype)["recurrence"]
    return config, fill_parameters(template, names, Place, lambda name: read_tensor(path, name), str(path))


@FOREIGN_FORMATS.register("huggingface")
class HuggingFaceFormat:
    """Folders of Hugging Face's transformers: config.json, safetensors and a tokenizer."""

    files = ("model*.safetensors", RECURRENCE_NAME, "*.json", "*.txt", "*.model")
    """Patterns of the files that are read."""

    @staticmethod
    def recognises(folder: epath.Path) -> bool:
        """Whether a folder, which may be on `gs://`, is in this format; its config is enough to plan a training."""
        if any((folder / name).exists() for name in (TENSORS_NAME, INDEX_NAME)):
            return True
        # A working folder of ours has a config.json, too.
        return (folder / CONFIG_NAME).exists() and "model_type" in read_json(folder / CONFIG_NAME)

    @staticmethod
    def open(folder: Path, changes: Changes, dtype: ActivationDtype) -> OpenedCheckpoint:
        """Opens a model at step 0, with these changes of its config and its matrices in this dtype."""
        return open_huggingface(folder, changes, dtype)

    @staticmethod
    def config(folder: Path, changes: Changes) -> RunConfig:
        """The config of a model, with these changes."""
        if family_of(folder, changes) is not None:
            return config_of_published(folder, changes)[0]
        return open_huggingface(folder, changes).run


def convert_from_huggingface(
    path: str | Path, gin_files: Sequence[str], gin_params: Sequence[str], folder: str | Path
) -> None:
    """Writes our checkpoint folder at step 0 from the model that `open_huggingface` opens, and a config.gin of model,
    vocabulary and segments in the working folder, the folder itself or the one above `checkpoints`."""
    theirs = Path(from_hub(path, HuggingFaceFormat.files))
    opened = open_huggingface(theirs, read_changes(gin_files, gin_params))
    run, place = opened.run, any_path(folder)
    if isinstance(run.vocabulary, FileVocabularyConfig) and not run.vocabulary.trained:
        # The checkpoint's own, so that the other folder is not needed any more.
        run = with_changes(run, {"vocabulary.model_file": str(place / VOCABULARY_FOLDER)})
    write_checkpoint(folder, opened.params, run, opened.vocabulary)
    names = {"RunConfig.model", "RunConfig.vocabulary", *bound_values(run.model), *bound_values(run.vocabulary)}
    workdir = place.parent if place.name == "checkpoints" else place
    sizes = [f"ReaderConfig.{name} = {getattr(run.data, name)}\n" for name in ("segment_length", "tokens_per_step")]
    write_whole(workdir / GIN_NAME, "\n".join([to_gin(run, names), "".join(sizes)]))


def open_huggingface(path: str | Path, changes: Changes, dtype: ActivationDtype = "float32") -> OpenedCheckpoint:
    """Opens a model of transformers, as at step 0.

    The folder determines the decoder and its recurrence, if it has one. The changes may set window, overlap, documents
    and vocabulary. By default the window is all positions, or the window that the recurrence was trained with, and the
    vocabulary is the one in the model's folder.
    """
    if family_of(path, changes) is not None:
        return open_published(path, changes, dtype)
    model, size, params = read_huggingface(path, dtype)
    # The segment length of base.gin is for another window.
    window = changes.value("PretrainedConfig.window_length", model.window_length)
    segment = changes.value("ReaderConfig.segment_length", window)
    reader = WindowsReaderConfig if model.summary else LanesReaderConfig
    is_ours = (Path(path) / SETTINGS_NAME).exists()
    start = dataclasses.replace(
        parse(),
        model=dataclasses.replace(model, window_length=window),
        vocabulary=saved_vocabulary_config(Path(path)) if is_ours else TokenizersVocabularyConfig(model_file=str(path)),
        data=reader(segment_length=segment, tokens_per_step=segment),
    )
    run = changes(start)
    decoder = (f"PretrainedConfig.{name}" for name in DECODER_FIELDS)
    fixed = {"RunConfig.model", *decoder, *bound_values(model.rotary_scaling)}
    if model.summary is not None:
        fixed |= {"PretrainedConfig.recurrence", *bound_values(model.summary)}
        fixed -= {"WindowSummary.scale", "WindowSummary.rate"}
    for name, (old, new) in differences(start, run).items():
        if name in fixed:
            raise UserError(f"{name} = {new!r}, but {path} has {old!r}")
    vocabulary = vocabulary_of(run, size, path)
    return OpenedCheckpoint(run, Model(run.model, vocabulary.size), params, vocabulary, 0)


def convert_to_huggingface(checkpoint: str | Path, folder: str | Path) -> None:
    """Writes our newest checkpoint as a folder that `transformers` reads, with its tokenizer."""
    opened = open_checkpoint(checkpoint)
    model = opened.run.model
    if isinstance(model, PretrainedConfig):
        _write_pretrained(opened, new_folder(folder))
    elif isinstance(model, DecoderConfig) and model.published:
        write_published(opened, folder := new_folder(folder))
        _write_tokenizer(opened.vocabulary, folder)
    else:
        own_decoders.check_decoder(opened.run.model, checkpoint)
        _write_own_decoder(opened, new_folder(folder))


def _write_pretrained(opened: OpenedCheckpoint, folder: Path) -> None:
    run, model, params, vocabulary, _ = opened
    write_huggingface(Pretrained(run.model, model.vocabulary_size, params), vocabulary.end_of_document, folder)
    _write_tokenizer(vocabulary, folder)


def _write_tokenizer(vocabulary: Vocabulary, folder: Path) -> None:
    """Writes the vocabulary for `open_huggingface`, and for transformers as far as it can express it."""
    vocabulary.save(folder)
    if not _write_tokenizer_json(vocabulary, folder):
        print(f"{folder}: {NO_TOKENIZER.format(vocabulary.kind)}: only we read it back")
        return
    # Tokens with a name are not suppressed in pretrained models, which may write them.
    names = Tokenizer.from_file(str(folder / TOKENIZER_NAME))
    unnamed = [token for token in _unwritable(vocabulary) if names.id_to_token(token) is None]
    if unnamed:
        _write_generation_config(vocabulary, unnamed, folder)


def _write_own_decoder(opened: OpenedCheckpoint, folder: Path) -> None:
    _, model, params, vocabulary, _ = opened
    config, tensors = own_decoders.to_huggingface_decoder(model, params, vocabulary.end_of_document)
    write_json(folder / CONFIG_NAME, config)
    save_tensors(tensors, folder / TENSORS_NAME, {"format": "pt"})
    write_whole(folder / own_decoders.MODEL.name, own_decoders.MODEL.read_bytes())
    vocabulary.save(folder)
    if not _write_tokenizer_json(vocabulary, folder):
        if settings := own_decoders.tokenizer_settings(vocabulary):
            write_whole(folder / own_decoders.TOKENIZER.name, own_decoders.TOKENIZER.read_bytes())
            _write_tokenizer_config(settings, folder)
        else:
            print(f"{folder}: {NO_TOKENIZER.format(vocabulary.kind)}: give the model token ids")
    _write_generation_config(vocabulary, _unwritable(vocabulary), folder)


def _write_tokenizer_json(vocabulary: Vocabulary, folder: Path) -> bool:
    """Writes a tokenizer without code for `transformers`; returns whether there is one like the vocabulary."""
    if (tokenizer := export_tokenizer(vocabulary)) is None:
        return False
    text, end_token = tokenizer
    write_whole(folder / TOKENIZER_NAME, text)
    _write_tokenizer_config({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end_token}, folder)
    return True


def _write_tokenizer_config(settings: dict[str, Any], folder: Path) -> None:
    # A tokenizer.json doesn't name the end-of-text token. transformers may remove spaces while decoding, read the text
    # of a control token as this token, and add inputs that models don't have.
    more = {"clean_up_tokenization_spaces": False, "split_special_tokens": True}
    write_json(folder / TOKENIZER_CONFIG_NAME, settings | more | {"model_input_names": ["input_ids", "attention_mask"]})


def _unwritable(vocabulary: Vocabulary) -> list[int]:
    return np.flatnonzero(~vocabulary.writable).tolist()


def _write_generation_config(vocabulary: Vocabulary, suppressed: list[int], folder: Path) -> None:
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), vocabulary.end_of_document)
    write_json(folder / GENERATION_NAME, ends | ({"suppress_tokens": suppressed} if suppressed else {}))
