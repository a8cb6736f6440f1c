"""What lies beside the arrays of a checkpoint, and how a checkpoint folder alone becomes a model that runs."""

import json
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from etils import epath
from jax.sharding import Mesh, SingleDeviceSharding

from meliad_like.config.run import RunConfig
from meliad_like.config.saved import from_json, to_dict
from meliad_like.data.vocabulary import Vocabulary, load_vocabulary
from meliad_like.errors import UserError
from meliad_like.models.model import Model
from meliad_like.remote import any_path, written_locally
from meliad_like.training.checkpoints import Checkpoints
from meliad_like.training.mesh import parameter_shardings

VOCABULARY_FOLDER = "vocabulary"


class OpenedCheckpoint(NamedTuple):
    """All that evaluation and generation need."""

    run: RunConfig
    model: Model
    params: Any
    vocabulary: Vocabulary
    step: int
    metadata: dict[str, Any]


def checkpoint_metadata(
    run: RunConfig, vocabulary: Vocabulary, step: int, store_fingerprint: str | None
) -> dict[str, Any]:
    """What is saved with every checkpoint; `store_fingerprint` is None where the documents are not known."""
    return {
        "config": to_dict(run),
        "vocabulary_size": vocabulary.size,
        "vocabulary_fingerprint": vocabulary.fingerprint,
        "store_fingerprint": store_fingerprint,
        "step": step,
    }


def save_vocabulary(vocabulary: Vocabulary, folder: epath.PathLike) -> None:
    """Puts the vocabulary into a checkpoint folder, which is made if need be."""
    with written_locally(epath.Path(folder) / VOCABULARY_FOLDER) as target:
        vocabulary.save(target)


def write_checkpoint(
    folder: epath.PathLike, params: Any, run: RunConfig, vocabulary: Vocabulary, step: int = 0
) -> None:
    """Makes a checkpoint folder of parameters that no training here has made, which `open_checkpoint` opens.

    Args:
      folder: made if need be.

    Raises:
      UserError: there are checkpoints already.
    """
    with Checkpoints(folder) as checkpoints:
        if steps := checkpoints.steps():
            raise UserError(f"{folder} has checkpoints already (step {steps[-1]}): choose another --output")
        save_vocabulary(vocabulary, folder)
        state = {"step": jnp.asarray(step, jnp.int32), "params": params}
        checkpoints.save(step, state, checkpoint_metadata(run, vocabulary, step, None))


def open_checkpoint(folder: epath.PathLike, *, step: int | None = None, mesh: Mesh | None = None) -> OpenedCheckpoint:
    """Opens a checkpoint folder, or the working folder that it lies in, for reading.

    Args:
      folder: nothing in it is changed.
      step: which checkpoint; None: the newest that is not damaged.
      mesh: where the parameters shall lie; None: on the first device.

    Raises:
      UserError: there is no usable checkpoint, or its vocabulary is missing or another one.
    """
    folder = any_path(folder)
    if (folder / "checkpoints").is_dir():
        folder = folder / "checkpoints"
    with Checkpoints(folder, read_only=True) as checkpoints:
        metadata = checkpoints.read_metadata(step)
        run = from_json(json.dumps(metadata["config"]))
        vocabulary = load_vocabulary(folder / VOCABULARY_FOLDER)
        if vocabulary.fingerprint != metadata["vocabulary_fingerprint"]:
            raise UserError(
                f"the vocabulary in {folder / VOCABULARY_FOLDER} ({vocabulary.fingerprint[:12]}) is not the one that "
                f"the checkpoint was trained with ({metadata['vocabulary_fingerprint'][:12]})"
            )
        model = Model(run.model, vocabulary.size)
        params, _ = checkpoints.restore_params(_placed(model, mesh), metadata["step"])
    return OpenedCheckpoint(run, model, params, vocabulary, metadata["step"], metadata)


def _placed(model: Model, mesh: Mesh | None) -> Any:
    """Shapes of the parameters with where they shall lie."""
    abstract = model.abstract_params
    if mesh is None:
        device = SingleDeviceSharding(jax.devices()[0])
        shardings = jax.tree.map(lambda _: device, abstract)
    else:
        shardings = parameter_shardings(mesh, model.axes, abstract)
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), abstract, shardings
    )
