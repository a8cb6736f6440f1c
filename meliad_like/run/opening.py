"""Checkpoint folders: the metadata that is saved with the arrays, and opening a folder as a model that runs."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from etils import epath
from jax.sharding import Mesh, SingleDeviceSharding

from meliad_like.command_line import Command
from meliad_like.config import Changes, RunConfig, bound_values, differences, parse, read_changes, rebuild, with_changes
from meliad_like.data.token_store import STORE_NAME, TokenStore
from meliad_like.errors import UserError
from meliad_like.mesh import MeshConfig, make_mesh, parameter_shardings
from meliad_like.models.config import ActivationDtype
from meliad_like.models.model import Model
from meliad_like.registry import Registry, fingerprint
from meliad_like.remote import any_path, flush_all, from_hub, is_remote, local_files, written_locally
from meliad_like.training.checkpoints import MANIFEST, Checkpoints
from meliad_like.vocabularies.base import Vocabulary, load_vocabulary, saved_vocabulary_config

VOCABULARY_FOLDER = "vocabulary"
FOREIGN_FORMATS = Registry("format", "meliad_like.conversion.pretrained")
"""The formats of other programs' models: classes with three static functions. `recognises(folder)` says whether a
folder, which may be on `gs://`, is in the format; `open(folder, changes, dtype)` opens one of this machine,
and `config(folder, changes)` is its config alone."""


class OpenedCheckpoint(NamedTuple):
    """A trained model as it was saved: its config, its parameters and its vocabulary."""

    run: RunConfig
    model: Model
    params: Any
    vocabulary: Vocabulary
    step: int
    stores: Sequence[str] = ()
    """The fingerprints of the token stores that it was trained with, if they are known."""

    @property
    def mesh(self) -> Mesh:
        """The mesh of the config, on which the parameters lie if they were opened with `mesh="config"`."""
        return make_mesh(self.run.mesh)


def checkpoint_metadata(run: RunConfig, vocabulary: Vocabulary, step: int, stores: Sequence[str] | None) -> dict:
    """The metadata of a checkpoint; `stores` are fingerprints, None where the documents are not known."""
    return {
        "config": bound_values(run),
        "vocabulary_fingerprint": vocabulary.fingerprint,
        "store_fingerprint": stores and (stores[0] if len(stores) == 1 else fingerprint(list(stores))),
        "stores": stores and list(stores),
        "step": step,
    }


def stores_read(metadata: Mapping[str, Any]) -> list[str]:
    """The fingerprints of the token stores that the run of a checkpoint with this metadata has read, if any."""
    # Checkpoints of before have the fingerprint alone.
    return metadata.get("stores") or [known] if (known := metadata.get("store_fingerprint")) else []


def save_vocabulary(vocabulary: Vocabulary, folder: epath.PathLike) -> None:
    """Saves the vocabulary in a checkpoint folder, which is made if needed."""
    with written_locally(epath.Path(folder) / VOCABULARY_FOLDER) as target:
        vocabulary.save(target)
        flush_all(target)


def saved_config(folder: epath.PathLike, step: int | None = None) -> RunConfig:
    """The config of a checkpoint with a mesh for this machine: every device has all parameters and its own lanes."""
    with Checkpoints(_our_folder(folder), read_only=True) as checkpoints:
        return _config_in(checkpoints.read_metadata(step))


def _config_in(metadata: Mapping[str, Any]) -> RunConfig:
    return dataclasses.replace(rebuild(RunConfig, metadata["config"]), mesh=MeshConfig())


def open_checkpoint(
    folder: epath.PathLike,
    *,
    step: int | None = None,
    changes: Callable[[RunConfig], RunConfig] = lambda run: run,
    mesh: Mesh | Literal["config"] | None = None,
    dtype: ActivationDtype = "float32",
) -> OpenedCheckpoint:
    """Opens a checkpoint folder, or the working folder that it lies in, for reading. Raises a UserError if there is no
    usable checkpoint, its vocabulary is missing or was replaced, or the changed model needs other parameters.

    Args:
      step: which checkpoint; None: the newest that is not damaged.
      changes: changes of `saved_config`, such as the result of `read_changes`. The model is as in the changed config.
      mesh: where the parameters lie: None: on the first device; `config`: on the mesh of the changed config.
      dtype: the dtype in which matrices are kept.
    """
    folder = _our_folder(folder)
    with Checkpoints(folder, read_only=True) as checkpoints:
        metadata = checkpoints.read_metadata(step)
        saved = _config_in(metadata)
        vocabulary = load_vocabulary(folder / VOCABULARY_FOLDER)
        if vocabulary.fingerprint != metadata["vocabulary_fingerprint"]:
            place = folder / VOCABULARY_FOLDER
            raise UserError(f"the vocabulary in {place} is not the one that the checkpoint was trained with")
        trained, run = Model(saved.model, vocabulary.size), changes(saved)
        model = Model(run.model, vocabulary.size) if run.model != saved.model else trained
        if model.axes != trained.axes or model.abstract_params != trained.abstract_params:
            changed = " ".join(differences(saved.model, run.model)) or "RunConfig.model"
            raise UserError(f"{changed} would need other parameters than those of the checkpoint {folder}")
        if (on_this_platform := run.model.on_this_platform()) != run.model:
            model = Model(on_this_platform, vocabulary.size)
        # On a mesh of one device, jitted functions would be compiled again for arrays that are not on that mesh.
        shardings = jax.tree.map(lambda _: SingleDeviceSharding(jax.devices()[0]), model.abstract_params)
        if mesh is not None:
            mesh = make_mesh(run.mesh) if mesh == "config" else mesh
            shardings = parameter_shardings(mesh, model.axes, model.abstract_params)
        sharded = jax.tree.map(lambda x, where: x.update(sharding=where), model.abstract_params_in(dtype), shardings)
        params, _ = checkpoints.restore_params(sharded, metadata["step"])
    return OpenedCheckpoint(run, model, params, vocabulary, metadata["step"], stores_read(metadata))


def config_for_training(folder: epath.PathLike, changes: Changes) -> RunConfig:
    """The config of a training that starts with the model in a folder (`open_model`): base.gin's config with its model,
    vocabulary and segments, and the changes."""
    folder = _from_hub(folder)
    if (other := _foreign_format(folder)) is not None:
        with local_files(folder) as place:
            return _of_folder(other.config(place, changes), place, folder)
    saved, base = saved_config(folder), parse()
    sizes = {name: getattr(saved.data, name) for name in ("segment_length", "tokens_per_step")}
    data = dataclasses.replace(base.data, **sizes)
    return changes(dataclasses.replace(base, model=saved.model, vocabulary=saved.vocabulary, data=data))


def config_of(command: Command, load_dir: str | None) -> RunConfig:
    """The run that a command's gin flags describe, which starts with the model in `load_dir`, if there is one."""
    if load_dir is None:
        return command.read_config()
    return config_for_training(load_dir, read_changes(command.gin_file.value, command.gin_param.value))


def _of_folder(run: RunConfig, place: Path, folder: epath.PathLike) -> RunConfig:
    """The config with the vocabulary of a folder by its own name, and not by that of `place`, the temporary copy."""
    in_copy = is_remote(folder) and getattr(run.vocabulary, "model_file", "") == str(place)
    return with_changes(run, {"vocabulary.model_file": str(folder)}) if in_copy else run


def open_model(
    folder: epath.PathLike,
    *,
    step: int | None = None,
    changes: Changes,
    mesh: Mesh | Literal["config"] | None = None,
    dtype: ActivationDtype = "float32",
) -> OpenedCheckpoint:
    """Opens a folder as `open_checkpoint` does, or one in the format of another program, perhaps on hf://."""
    named, folder = folder, _from_hub(folder)
    if (other := _foreign_format(folder)) is not None:
        if step is not None:
            raise UserError(f"step={step}: {folder} is not a training, and has only one state")
        with local_files(folder) as place:
            opened = other.open(place, changes, dtype)
        opened, model = opened._replace(run=_of_folder(opened.run, place, folder)), opened.model
        if (config := model.config.on_this_platform()) != model.config:
            opened = opened._replace(model=Model(config, opened.vocabulary.size))
        if mesh is None:
            return opened
        mesh = opened.mesh if mesh == "config" else mesh
        shardings = parameter_shardings(mesh, model.axes, model.abstract_params)
        return opened._replace(params=jax.device_put(opened.params, shardings))
    if folder is not named:
        formats = "; ".join(f"{name}: {other.files[0]}" for name, other in FOREIGN_FORMATS.items())
        raise UserError(f"{named} has no model in a format that can be read ({formats})")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", str(folder)) and not any_path(folder).exists():
        raise UserError(f"there is no folder {folder}: a model of the Hub is hf://{folder}, or hf://{folder}@REVISION")
    return open_checkpoint(folder, step=step, changes=changes, mesh=mesh, dtype=dtype)


def _our_folder(folder: epath.PathLike) -> epath.Path:
    """The checkpoint folder in a folder. Raises a UserError if it is in the format of another program."""
    if other := _foreign_format(folder):
        (name,) = (name for name, each in FOREIGN_FORMATS.items() if each is other)
        convert = f"python -m meliad_like.convert {name} --input={folder} --output=DIR/checkpoints"
        raise UserError(f"{folder} is no checkpoint folder: {convert} makes one of it in DIR")
    return checkpoints_folder(folder)


def _foreign_format(folder: epath.PathLike) -> Any | None:
    """The format of another program that a folder is in; None: it is a checkpoint folder, or none of them."""
    if (checkpoints_folder(folder) / VOCABULARY_FOLDER).exists():
        return None
    return next((each for each in FOREIGN_FORMATS.values() if each.recognises(any_path(folder))), None)


def _from_hub(folder: epath.PathLike) -> epath.PathLike:
    # A generator, because formats of other programs are not imported for our own models.
    return from_hub(folder, (pattern for each in FOREIGN_FORMATS.values() for pattern in each.files))


def checkpoints_folder(folder: epath.PathLike) -> epath.Path:
    """The folder of a run's checkpoints; `folder` is that folder or the run's working folder."""
    folder = any_path(folder)
    if folder.name.isdecimal() and (folder / MANIFEST).exists():
        raise UserError(f"{folder} is the checkpoint of one step: name {folder.parent}, and --step={folder.name}")
    return folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder


def open_store(opened: OpenedCheckpoint, folder: str | Path, store: str | None, prepare: bool) -> TokenStore:
    """Opens the newest version of the token store in the folder `store` for a checkpoint of `folder`; None: the version
    that it was trained with of the one in the config.

    With `prepare` a missing store is made, from the documents in the config and the vocabulary of the checkpoint,
    documents are added to the one in `store`, and one of other documents is refused.
    """
    if not (named := store or opened.run.data.store):
        raise UserError(f"the config of {folder} names no token store: give --store=DIR")
    place = any_path(named)
    is_there = (place / STORE_NAME).exists()
    if not is_there or (store and prepare and TokenStore(place).check_documents(opened.run.source)):
        if not prepare:
            way_out = "give --store=DIR, or add --prepare to make it from the documents of the checkpoint's config"
            raise UserError(f"there is no token store at {place}: {way_out}")
        # Importing what sources need takes a while.
        from meliad_like.data.preparation import prepare as make_store

        if (saved := checkpoints_folder(folder) / VOCABULARY_FOLDER).exists():
            # Training the vocabulary again, on the documents of this machine, could give another one.
            with local_files(saved) as copy:
                make_store(opened.run.source, saved_vocabulary_config(copy), place)
        else:
            make_store(opened.run.source, opened.run.vocabulary, place)
    opened_store = TokenStore(place) if store else TokenStore(place).read_by(opened.stores)
    opened_store.check_vocabulary(opened.vocabulary.fingerprint, f"the checkpoint {folder}")
    if prepare:
        opened_store.check_documents(opened.run.source)
    return opened_store
