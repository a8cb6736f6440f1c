"""Pretrained models: folders of Hugging Face's transformers, read and written without PyTorch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from meliad_like.config import Changes, RunConfig, bound_values, read_changes, to_gin, with_changes
from meliad_like.config.saved import GIN_NAME
from meliad_like.conversion import own_decoders
from meliad_like.conversion.parameters import vocabulary_of, write_checkpoint
from meliad_like.conversion.published.folder import config_of_published, open_published, write_published
from meliad_like.conversion.published.windows import RECURRENCE_NAME
from meliad_like.conversion.tensor_files import CONFIG_NAME, GENERATION_NAME, INDEX_NAME, TENSORS_NAME, save_tensors
from meliad_like.errors import UserError
from meliad_like.families.pretrained.config import PretrainedConfig
from meliad_like.models.config import ActivationDtype
from meliad_like.models.decoder import DecoderConfig
from meliad_like.remote import any_path, from_hub, write_whole
from meliad_like.resumable import read_json, write_json
from meliad_like.run.opening import FOREIGN_FORMATS, VOCABULARY_FOLDER, OpenedCheckpoint, open_checkpoint
from meliad_like.vocabularies.base import DEFAULT_END, ByteVocabulary, FileVocabularyConfig, Vocabulary
from meliad_like.vocabularies.tokenizers import (
    BYTE_CHARACTERS,
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
    TokenizersVocabulary,
)

NO_TOKENIZER = "transformers has no tokenizer like the {} vocabulary"


def new_folder(path: str | Path) -> Path:
    """Makes a folder for the files of a model; it may exist, but must be empty."""
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is {'not empty' if folder.is_dir() else 'a file'}: choose another --output")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


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
        return open_published(folder, changes, dtype)

    @staticmethod
    def config(folder: Path, changes: Changes) -> RunConfig:
        """The config of a model, with these changes. Raises a UserError if its vocabulary has another size."""
        run, model = config_of_published(folder, changes)
        if not run.vocabulary.trained:
            vocabulary_of(run, model.vocabulary_size, folder)
        return run


def convert_from_huggingface(
    path: str | Path, gin_files: Sequence[str], gin_params: Sequence[str], folder: str | Path
) -> None:
    """Writes our checkpoint folder at step 0 from the model that `open_published` opens, and a config.gin of model,
    vocabulary and segments in the working folder, the folder itself or the one above `checkpoints`."""
    theirs = Path(from_hub(path, HuggingFaceFormat.files))
    opened = open_published(theirs, read_changes(gin_files, gin_params))
    run, place = opened.run, any_path(folder)
    if isinstance(run.vocabulary, FileVocabularyConfig) and not run.vocabulary.trained:
        # The checkpoint's own, so that the other folder is not needed any more.
        run = with_changes(run, {"vocabulary.model_file": str(place / VOCABULARY_FOLDER)})
    write_checkpoint(folder, opened.params, run, opened.vocabulary)
    names = {"RunConfig.model", "RunConfig.vocabulary", *bound_values(run.model), *bound_values(run.vocabulary)}
    workdir = place.parent if place.name == "checkpoints" else place
    sizes = [f"ReaderConfig.{name} = {getattr(run.data, name)}\n" for name in ("segment_length", "tokens_per_step")]
    write_whole(workdir / GIN_NAME, "\n".join([to_gin(run, names), "".join(sizes)]))


def convert_to_huggingface(checkpoint: str | Path, folder: str | Path, dtype: ActivationDtype = "float32") -> None:
    """Writes our newest checkpoint as a folder that `transformers` reads, with its tokenizer; a pretrained model with
    tensors of this dtype."""
    opened = open_checkpoint(checkpoint)
    model = opened.run.model
    if isinstance(model, PretrainedConfig) or (isinstance(model, DecoderConfig) and model.published):
        write_published(opened, folder := new_folder(folder), dtype)
        _write_tokenizer(opened.vocabulary, folder)
    else:
        own_decoders.check_decoder(opened.run.model, checkpoint)
        if dtype != "float32":
            raise UserError(
                f"dtype={dtype}: {checkpoint} is a decoder of ours, whose file of PyTorch has float32 alone"
            )
        _write_own_decoder(opened, new_folder(folder))


def _write_tokenizer(vocabulary: Vocabulary, folder: Path) -> None:
    """Writes the vocabulary for `open_published`, and for transformers as far as it can express it."""
    vocabulary.save(folder)
    if not _write_tokenizer_json(vocabulary, folder):
        print(f"{folder}: {NO_TOKENIZER.format(vocabulary.kind)}: only we read it back")
        return
    # Tokens with a name are not suppressed in pretrained models, which may write them.
    names = Tokenizer.from_file(str(folder / TOKENIZER_NAME))
    unnamed = [token for token in _unwritable(vocabulary) if names.id_to_token(token) is None]
    if unnamed or len(vocabulary.end_tokens) > 1:
        _write_generation_config(vocabulary, unnamed, folder)


def _write_own_decoder(opened: OpenedCheckpoint, folder: Path) -> None:
    _, model, params, vocabulary, *_ = opened
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


def export_tokenizer(vocabulary: Vocabulary) -> tuple[str, str] | None:
    """The same encoding for Hugging Face's `tokenizers`: the contents of a tokenizer.json, and the token that ends
    documents. None if that library can't express it."""
    if isinstance(vocabulary, TokenizersVocabulary):
        return vocabulary.tokenizer_json(), vocabulary.end_token
    if isinstance(vocabulary, ByteVocabulary):
        tokenizer = Tokenizer(models.BPE(BYTE_CHARACTERS, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
        tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
        tokenizer.add_special_tokens([AddedToken(DEFAULT_END, special=True)])
        return tokenizer.to_str(), DEFAULT_END
    return None


def _write_tokenizer_config(settings: dict[str, Any], folder: Path) -> None:
    # A tokenizer.json doesn't name the end-of-text token. transformers may remove spaces while decoding, read the text
    # of a control token as this token, and add inputs that models don't have.
    more = {"clean_up_tokenization_spaces": False, "split_special_tokens": True}
    write_json(folder / TOKENIZER_CONFIG_NAME, settings | more | {"model_input_names": ["input_ids", "attention_mask"]})


def _unwritable(vocabulary: Vocabulary) -> list[int]:
    return np.flatnonzero(~vocabulary.writable).tolist()


def _write_generation_config(vocabulary: Vocabulary, suppressed: list[int], folder: Path) -> None:
    first, *others = vocabulary.end_tokens
    ends = {"bos_token_id": first, "eos_token_id": [first, *others] if others else first}
    write_json(folder / GENERATION_NAME, ends | ({"suppress_tokens": suppressed} if suppressed else {}))
