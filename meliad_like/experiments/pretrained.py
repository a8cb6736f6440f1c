"""The pretrained model with which the rows of a table begin."""

from pathlib import Path
from typing import Any

from meliad_like import config
from meliad_like.errors import UserError
from meliad_like.families.pretrained.config import DECODER_FIELDS, PretrainedConfig
from meliad_like.run.opening import VOCABULARY_FOLDER, checkpoints_folder, saved_config
from meliad_like.vocabularies.base import VOCABULARIES, saved_vocabulary_config
from meliad_like.vocabularies.tokenizers import TOKENIZER_NAME, TokenizersVocabularyConfig

HOW_TO_GET_ONE = (
    "python -m meliad_like.convert huggingface --input=FOLDER --output=DIR/checkpoints makes it from a folder of "
    "transformers"
)


def fields_of(folder: Path) -> dict[str, Any]:
    """The values that a pretrained model gives to fields of the decoder and the vocabulary, by `Class.field`."""
    if not folder.is_dir():
        raise UserError(f"there is no pretrained model at --load_dir={folder}: {HOW_TO_GET_ONE}")
    model, saved = saved_config(folder).model, checkpoints_folder(folder) / VOCABULARY_FOLDER
    vocabulary = saved_vocabulary_config(Path(saved))
    if not isinstance(model, PretrainedConfig) or not isinstance(vocabulary, TokenizersVocabularyConfig):
        held = f"{type(model).__name__} with a vocabulary of {VOCABULARIES.name_of(vocabulary)}"
        raise UserError(f"--load_dir={folder} holds {held}, not a pretrained model: {HOW_TO_GET_ONE}")
    values = config.bound_values(model)
    decoder = {name: values[name] for name in (f"PretrainedConfig.{field}" for field in DECODER_FIELDS)}
    decoder |= config.bound_values(model.rotary_scaling)
    return decoder | {
        "RunConfig.vocabulary": "tokenizers",
        "FileVocabularyConfig.model_file": str(Path(saved / TOKENIZER_NAME).absolute()),
        "TokenizersVocabularyConfig.end_token": vocabulary.end_token,
        "VocabularyConfig.size_multiple": vocabulary.size_multiple,
    }
