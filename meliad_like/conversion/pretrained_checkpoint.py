"""Converts pretrained models to our checkpoint folders, and back."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from meliad_like.config import Changes, RunConfig, bound_values, differences, parse, read_changes
from meliad_like.conversion.pretrained_files import Pretrained, read_gguf, read_huggingface, write_huggingface
from meliad_like.data.readers import LanesReaderConfig, WindowsReaderConfig
from meliad_like.data.tokenizers_vocabulary import (
    TOKENIZER_CONFIG_NAME,
    TokenizersVocabulary,
    TokenizersVocabularyConfig,
)
from meliad_like.errors import UserError
from meliad_like.models.pretrained.config import DECODER_FIELDS, PretrainedConfig
from meliad_like.resumable import write_json
from meliad_like.run.opening import open_checkpoint, write_checkpoint


def convert_from_pretrained(
    kind: str, path: str | Path, gin_files: Sequence[str], gin_params: Sequence[str], folder: str | Path
) -> None:
    """Writes our checkpoint folder at step 0, for evaluation, generation and fine-tuning.

    The file determines the decoder and its recurrence, if it has one. Gin files and bindings may set window, overlap,
    documents and vocabulary. By default the window is all positions, or the window that the recurrence was
    trained with, and the vocabulary is the one in the model's folder.

    Args:
      kind: `huggingface`: a folder of config.json and safetensors; `gguf`: a file.
    """
    changes = read_changes(gin_files, gin_params)
    pretrained = read_gguf(path) if kind == "gguf" else read_huggingface(path)
    run = run_of(pretrained, path, changes)
    vocabulary = run.vocabulary.make()
    if vocabulary.size != pretrained.vocabulary_size:
        raise UserError(
            f"{path} has {pretrained.vocabulary_size} tokens and its vocabulary {vocabulary.size}: set "
            f"FileVocabularyConfig.model_file, or VocabularyConfig.size_multiple={pretrained.vocabulary_size} if only "
            "unused ids are missing"
        )
    write_checkpoint(folder, pretrained.params, run, vocabulary)


def run_of(pretrained: Pretrained, path: str | Path, changes: Changes) -> RunConfig:
    """The run config of a pretrained model with the changes of a user, which must not contradict its file."""
    model = pretrained.config
    # The segment length of base.gin is for another window.
    window = changes.value("PretrainedConfig.window_length", model.window_length)
    segment = changes.value("ReaderConfig.segment_length", window)
    reader = WindowsReaderConfig if model.summary else LanesReaderConfig
    start = dataclasses.replace(
        parse(),
        model=dataclasses.replace(model, window_length=window),
        vocabulary=TokenizersVocabularyConfig(model_file=str(path)),
        data=reader(segment_length=segment, tokens_per_step=segment),
    )
    run = changes(start)
    fixed = {"RunConfig.model", *(f"PretrainedConfig.{name}" for name in DECODER_FIELDS)}
    if model.summary is not None:
        fixed |= {"PretrainedConfig.mechanisms", *bound_values(model.summary)}
        fixed -= {"WindowSummary.scale", "WindowSummary.rate"}
    for name, (old, new) in differences(start, run).items():
        if name in fixed:
            raise UserError(f"{name} = {new!r}, but {path} has {old!r}")
    return run


def convert_to_huggingface(checkpoint: str | Path, folder: str | Path) -> None:
    """Writes our newest checkpoint as a folder that `transformers` reads, with its tokenizer."""
    opened = open_checkpoint(checkpoint)
    folder = Path(folder)
    if not isinstance(opened.run.model, PretrainedConfig):
        raise UserError(f"{checkpoint} is a {type(opened.run.model).__name__} model: only pretrained ones go back")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is {'not empty' if folder.is_dir() else 'a file'}: choose another --output")
    folder.mkdir(parents=True, exist_ok=True)
    pretrained = Pretrained(opened.run.model, opened.vocabulary.size, opened.params)
    write_huggingface(pretrained, opened.vocabulary.end_of_document, folder)
    if isinstance(opened.vocabulary, TokenizersVocabulary):
        opened.vocabulary.save(folder)
        # A tokenizer.json doesn't name the end-of-text token, which is needed when the folder is read again.
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": opened.vocabulary.end_token}
        write_json(folder / TOKENIZER_CONFIG_NAME, settings)
