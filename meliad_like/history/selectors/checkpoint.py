"""The folder of a trained selector, which is all that using the selector needs.

selector.json    the configs, and what the selector was trained on
encoder/         the pretrained decoder, if it was not trained
checkpoints/     the newest parameters, with the optimizer's state
best/            the parameters with the least validation loss
vectors/         vectors of a fixed encoder, used in training only
metrics.jsonl
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from meliad_like.config.saved import from_plain
from meliad_like.data.vocabulary import Vocabulary, load_vocabulary
from meliad_like.errors import UserError
from meliad_like.history.config import HistorySettings
from meliad_like.history.selectors.inputs import SelectorInputs, make_inputs
from meliad_like.history.selectors.model import Params, Selector
from meliad_like.models.pretrained.config import PretrainedConfig
from meliad_like.registry import to_plain
from meliad_like.run.opening import VOCABULARY_FOLDER
from meliad_like.saved_json import check_fields, read_json
from meliad_like.training.checkpoints import Checkpoints

FILE_NAME = "selector.json"
TYPES: dict[str, type] = {
    "history": dict, "selector": dict, "encoder": dict, "vocabulary_fingerprint": str, "vocabulary_size": int,
}  # fmt: skip
"""Fields of the file that using the selector needs."""


class OpenedSelector(NamedTuple):
    """All that scoring needs."""

    selector: Selector
    params: Params
    inputs: SelectorInputs
    vocabulary: Vocabulary
    step: int


def selector_metadata(selector: Selector, inputs: SelectorInputs, vocabulary: Vocabulary) -> dict[str, Any]:
    """What decides a selector, for `selector.json` and every checkpoint."""
    settings = to_plain(HistorySettings(inputs.history, selector.config))
    return {name: settings[name] for name in ("history", "selector")} | {
        "encoder": to_plain(selector.encoder_config),
        "vocabulary_size": selector.vocabulary_size,
        "vocabulary_fingerprint": vocabulary.fingerprint,
        "leaks_the_future": inputs.leaks_the_future,
    }


def save_encoder(folder: Path, params: Params) -> None:
    """Keeps a decoder that is not trained, once for all checkpoints."""
    with Checkpoints(folder / "encoder") as checkpoints:
        if not checkpoints.steps():
            checkpoints.save(0, {"step": np.int32(0), "params": params}, {})


def open_selector(folder: str | Path) -> OpenedSelector:
    """Opens the working folder of a training: the best parameters, or the newest where none were evaluated.

    Raises:
      UserError: there is no selector, or its files don't belong together.
    """
    folder = Path(folder).expanduser()
    saved = read_metadata(folder)
    try:
        settings = from_plain(HistorySettings, {name: saved[name] for name in ("history", "selector")})
        encoder_config = from_plain(PretrainedConfig, saved["encoder"], "encoder")
    except UserError as error:
        raise UserError(f"{folder / FILE_NAME} is of another version: {error}; train the selector again") from None
    vocabulary = load_vocabulary(folder / VOCABULARY_FOLDER)
    if vocabulary.fingerprint != saved["vocabulary_fingerprint"]:
        raise UserError(
            f"the vocabulary in {folder / VOCABULARY_FOLDER} ({vocabulary.fingerprint[:12]}) is not the one that the "
            f"selector was trained with ({saved['vocabulary_fingerprint'][:12]})"
        )
    selector = Selector(settings.selector, encoder_config, saved["vocabulary_size"])
    inputs = make_inputs(settings.history, settings.selector, vocabulary)
    abstract = jax.eval_shape(selector.init, jax.random.key(0))
    encoder = selector.encoder.abstract_params
    trained = abstract | ({"encoder": encoder} if selector.config.train_encoder else {})
    params, step = _restore(folder / ("best" if (folder / "best").is_dir() else "checkpoints"), trained)
    if not selector.config.train_encoder:
        params["encoder"], _ = _restore(folder / "encoder", encoder)
    return OpenedSelector(selector, params, inputs, vocabulary, step)


def _restore(folder: Path, abstract: Params) -> tuple[Params, int]:
    """The newest parameters in a checkpoint folder, on the first device, and their step."""
    device = SingleDeviceSharding(jax.devices()[0])
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), abstract)
    with Checkpoints(folder, read_only=True) as checkpoints:
        params, metadata = checkpoints.restore_params(placed)
    return params, metadata.get("step", 0)


def read_metadata(folder: Path) -> dict[str, Any]:
    """The contents of `selector.json`.

    Raises:
      UserError: there is none, or it is damaged.
    """
    try:
        saved = read_json(folder / FILE_NAME)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"there is no selector in {folder}: python -m meliad_like.history train_selector --output=DIR makes one"
        ) from None
    check_fields(saved, TYPES, str(folder / FILE_NAME))
    return saved
