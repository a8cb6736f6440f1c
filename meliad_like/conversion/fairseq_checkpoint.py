"""Checkpoints of fairseq's `transformer_lm_wiki103` and of the Shortformer's authors as checkpoint folders of ours."""

import argparse
import pickle
from pathlib import Path

import numpy as np

from meliad_like.config import RunConfig
from meliad_like.conversion.fairseq import from_fairseq
from meliad_like.data.vocabulary import make_vocabulary
from meliad_like.errors import UserError
from meliad_like.models.model import Model
from meliad_like.models.shortformer import ShortformerConfig
from meliad_like.run.opening import write_checkpoint


def read_fairseq(path: str | Path) -> dict[str, np.ndarray]:
    """Reads the parameters of a fairseq checkpoint (`.pt`), float32, by their names. No code in the file is executed.

    Raises:
      UserError: PyTorch is not installed, or the file can't be read or contains pickled objects.
    """
    try:
        import torch  # type: ignore[import-not-found]  # an extra
    except ImportError:
        raise UserError("reading fairseq's checkpoints needs PyTorch: pip install -e '.[fairseq]'") from None
    try:
        # The file also contains the settings of the training.
        with torch.serialization.safe_globals([argparse.Namespace]):
            saved = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise UserError(f"{path} is no checkpoint of weights and settings: {str(error).splitlines()[0]}") from None
    if not isinstance(saved, dict) or "model" not in saved:
        raise UserError(f"{path} is no checkpoint of fairseq: there is no model in it")
    return {name: tensor.float().numpy() for name, tensor in saved["model"].items()}


def convert_from_fairseq(path: str | Path, run: RunConfig, folder: str | Path) -> None:
    """Writes our checkpoint folder at step 0, for evaluation, generation and fine-tuning.

    Raises:
      UserError: the checkpoint does not match the config or the vocabulary, or `folder` already has checkpoints.
    """
    if not isinstance(run.model, ShortformerConfig):
        raise UserError("a checkpoint of fairseq is a Shortformer: add --gin_file=shortformer/shortformer.gin")
    if run.vocabulary.trained:
        raise UserError("the checkpoint has the words of its own dict.txt: set FileVocabularyConfig.model_file to it")
    vocabulary = make_vocabulary(run.vocabulary)
    params = from_fairseq(read_fairseq(path), Model(run.model, vocabulary.size).abstract_params)
    write_checkpoint(folder, params, run, vocabulary)
