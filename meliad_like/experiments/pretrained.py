"""The pretrained model that all rows of a table begin with."""

import json
from pathlib import Path
from typing import Any

from meliad_like.data.table_vocabulary import SETTINGS_NAME
from meliad_like.data.vocabulary import TOKENIZER_NAME
from meliad_like.errors import UserError
from meliad_like.models.pretrained.config import DECODER_FIELDS, PretrainedConfig
from meliad_like.run.opening import VOCABULARY_FOLDER, saved_config

HOW_TO_GET_ONE = (
    "python -m meliad_like.convert huggingface --input=FOLDER --output=DIR/checkpoints makes it from a folder of "
    "transformers, convert gguf from a GGUF file"
)


def fields_of(folder: Path) -> dict[str, Any]:
    """The values that a checkpoint folder gives to fields of the decoder and the vocabulary, by `Class.field`.

    Raises:
      UserError: there is no pretrained model.
    """
    checkpoints = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    if not checkpoints.is_dir():
        raise UserError(f"there is no pretrained model at --load_dir={folder}: {HOW_TO_GET_ONE}")
    model = saved_config(checkpoints).model
    vocabulary = json.loads((checkpoints / VOCABULARY_FOLDER / SETTINGS_NAME).read_text())
    if not isinstance(model, PretrainedConfig) or vocabulary["kind"] != "tokenizers":
        held = f"{type(model).__name__} with a vocabulary of {vocabulary['kind']}"
        raise UserError(f"--load_dir={folder} holds {held}, not a pretrained model: {HOW_TO_GET_ONE}")
    return {f"PretrainedConfig.{name}": getattr(model, name) for name in DECODER_FIELDS} | {
        "RunConfig.vocabulary": "tokenizers",
        "FileVocabularyConfig.model_file": str((checkpoints / VOCABULARY_FOLDER / TOKENIZER_NAME).absolute()),
        "TokenizersVocabularyConfig.end_token": vocabulary["end_token"],
        "VocabularyConfig.size_multiple": vocabulary["size_multiple"],
    }
