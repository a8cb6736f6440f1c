"""What lies in the folder of a trained selector, and how that folder alone becomes one that scores.

selector.json    the configs, and what the selector was trained on
encoder/         the pretrained decoder, where it stays as it was
checkpoints/     the newest parameters, with the optimizer's state
best/            those with the least validation loss
vectors/         of a fixed encoder, for training alone
metrics.jsonl
"""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from meliad_like.config.fields import field_types, fit
from meliad_like.data.vocabulary import Vocabulary, load_vocabulary
from meliad_like.errors import UserError
from meliad_like.history.selectors.config import SelectorConfig
from meliad_like.history.selectors.inputs import SelectorInputs, make_inputs
from meliad_like.history.selectors.model import Params, Selector
from meliad_like.history.spans import HistoryConfig
from meliad_like.models.pretrained.config import PretrainedConfig
from meliad_like.run.opening import VOCABULARY_FOLDER
from meliad_like.saved_json import check_fields, read_json
from meliad_like.training.checkpoints import Checkpoints

FILE_NAME = "selector.json"
CONFIGS: dict[str, type] = {"selector": SelectorConfig, "history": HistoryConfig, "encoder": PretrainedConfig}


class OpenedSelector(NamedTuple):
    """All that scoring needs."""

    folder: Path
    selector: Selector
    params: Params
    inputs: SelectorInputs
    vocabulary: Vocabulary
    step: int
    metadata: dict[str, Any]


def selector_metadata(selector: Selector, inputs: SelectorInputs, vocabulary: Vocabulary) -> dict[str, Any]:
    """What decides a selector, for `selector.json` and every checkpoint."""
    return {
        "selector": dataclasses.asdict(selector.config),
        "history": dataclasses.asdict(inputs.history),
        "encoder": dataclasses.asdict(selector.encoder_config),
        "vocabulary_size": selector.vocabulary_size,
        "vocabulary_fingerprint": vocabulary.fingerprint,
        "leaks_the_future": inputs.leaks_the_future,
    }


def save_encoder(folder: Path, params: Params) -> None:
    """Keeps a decoder that training leaves as it is, once for all checkpoints."""
    with Checkpoints(folder / "encoder") as checkpoints:
        if not checkpoints.steps():
            checkpoints.save(0, {"step": np.int32(0), "params": params}, {})


def restore_encoder(folder: Path, selector: Selector) -> Params:
    """What `save_encoder` kept."""
    with Checkpoints(folder / "encoder", read_only=True) as checkpoints:
        return checkpoints.restore_params(on_one_device(selector.encoder.abstract_params))[0]


def open_selector(folder: str | Path) -> OpenedSelector:
    """Opens the working folder of a training for reading: the best parameters, or the newest where none was measured.

    Raises:
      UserError: there is no selector, or its files don't belong together.
    """
    folder = Path(folder).expanduser()
    saved = read_metadata(folder)
    configs = {name: _restore_config(kind, saved[name], folder) for name, kind in CONFIGS.items()}
    vocabulary = load_vocabulary(folder / VOCABULARY_FOLDER)
    if vocabulary.fingerprint != saved["vocabulary_fingerprint"]:
        raise UserError(
            f"the vocabulary in {folder / VOCABULARY_FOLDER} ({vocabulary.fingerprint[:12]}) is not the one that the "
            f"selector was trained with ({saved['vocabulary_fingerprint'][:12]})"
        )
    selector = Selector(configs["selector"], configs["encoder"], saved["vocabulary_size"])
    inputs = make_inputs(configs["history"], configs["selector"], vocabulary)
    abstract = jax.eval_shape(selector.init, jax.random.key(0))
    if selector.config.train_encoder:
        abstract |= {"encoder": selector.encoder.abstract_params}
    measured = (folder / "best").is_dir()
    with Checkpoints(folder / ("best" if measured else "checkpoints"), read_only=True) as checkpoints:
        params, metadata = checkpoints.restore_params(on_one_device(abstract))
    if not selector.config.train_encoder:
        params |= {"encoder": restore_encoder(folder, selector)}
    return OpenedSelector(folder, selector, params, inputs, vocabulary, metadata["step"], metadata)


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
    types: dict[str, type] = dict.fromkeys(CONFIGS, dict)
    check_fields(saved, types | {"vocabulary_fingerprint": str, "vocabulary_size": int}, str(folder / FILE_NAME))
    return saved


def on_one_device(abstract: Any) -> Any:
    """Shapes, with the first device as the place where they shall lie."""
    device = SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), abstract)


def _restore_config(kind: type, saved: dict[str, Any], folder: Path) -> Any:
    types = field_types(kind)
    if strange := saved.keys() - types.keys():
        name = f"{kind.__name__}.{min(strange)}"
        raise UserError(f"{folder / FILE_NAME} is of another version, which differs in {name}: train the selector anew")
    return kind(**{key: fit(value, types[key], f"{kind.__name__}.{key}") for key, value in saved.items()})
