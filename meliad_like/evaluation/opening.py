"""From a checkpoint folder to what an evaluation needs: the model, its parameters, and the documents."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from etils import epath
from jax.sharding import Mesh

from meliad_like.config.bindings import Bindings, collect
from meliad_like.config.run import RunConfig, build
from meliad_like.config.saved import to_bindings
from meliad_like.data.dictionary_vocabulary import DICTIONARY_NAME
from meliad_like.data.token_store import STORE_NAME, TokenStore
from meliad_like.data.vocabulary import MODEL_NAME, TOKENIZER_NAME, TokenizersVocabulary
from meliad_like.errors import UserError
from meliad_like.models.model import Model
from meliad_like.remote import any_path
from meliad_like.training.mesh import make_mesh
from meliad_like.training.opening import VOCABULARY_FOLDER, OpenedCheckpoint, open_checkpoint


def open_with(
    folder: str | Path, gin_params: Sequence[str] = (), step: int | None = None, gin_files: Sequence[str] = ()
) -> tuple[OpenedCheckpoint, Mesh]:
    """Opens a checkpoint folder with some bindings of its config changed, such as a shorter segment.

    What base.gin binds changes nothing.

    The mesh of the training belongs to its machine. Here every device has all parameters and lanes of its own, unless
    a binding of MeshConfig says otherwise.

    Raises:
      UserError: as `open_checkpoint`; or a binding is wrong, or would need other parameters.
    """
    bindings = _bindings(gin_params, gin_files)
    mesh = make_mesh(build({key: value for key, value in bindings.items() if key.startswith("MeshConfig.")}).mesh)
    opened = open_checkpoint(folder, step=step, mesh=mesh)
    run = _changed(opened.run, bindings)
    model = Model(run.model, opened.vocabulary.size)
    if model.axes != opened.model.axes or model.abstract_params != opened.model.abstract_params:
        given = " ".join(key for key in bindings if key.startswith(f"{type(run.model).__name__}."))
        raise UserError(f"{given} would need other parameters than those of the checkpoint {folder}")
    return opened._replace(run=run, model=model), mesh


def open_store(opened: OpenedCheckpoint, folder: str | Path, store: str | None, prepare: bool) -> TokenStore:
    """The documents.

    Args:
      opened: the checkpoint in `folder`, or in its folder `checkpoints`.
      folder: of the checkpoint.
      store: of the token store; None: the one that the config names.
      prepare: make the store where there is none, from the config's documents and the checkpoint's own vocabulary.

    Raises:
      UserError: there is no store, or one of another vocabulary.
    """
    place = any_path(store or opened.run.data.store)
    if not (place / STORE_NAME).exists():
        if not prepare:
            raise UserError(
                f"there is no token store at {place}: give --store=DIR, or add --prepare to make it from the "
                f"{opened.run.source.kind} documents ({opened.run.source.folder or 'of this Python'}) that the "
                "checkpoint's config names; --gin_param=SourceConfig.folder=... where they lie elsewhere"
            )
        _prepare(opened, any_path(folder), place)
    found = TokenStore(place)
    found.check_vocabulary(opened.vocabulary.fingerprint, f"the checkpoint {folder}")
    return found


def _prepare(opened: OpenedCheckpoint, folder: epath.Path, place: epath.Path) -> None:
    # Importing what sources need takes a while.
    from meliad_like.data.preparation import prepare

    vocabulary = opened.run.vocabulary
    checkpoints = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
    saved = checkpoints / VOCABULARY_FOLDER
    if vocabulary.kind == "sentencepiece":
        # Trained anew on what documents there are here, it could be another one.
        vocabulary = dataclasses.replace(vocabulary, model_file=str(saved / MODEL_NAME))
    elif vocabulary.kind == "dictionary":
        vocabulary = dataclasses.replace(vocabulary, model_file=str(saved / DICTIONARY_NAME))
    elif isinstance(opened.vocabulary, TokenizersVocabulary):
        end_token = opened.vocabulary.end_token
        vocabulary = dataclasses.replace(vocabulary, model_file=str(saved / TOKENIZER_NAME), end_token=end_token)
    prepare(opened.run.source, vocabulary, place)


def _bindings(gin_params: Sequence[str], gin_files: Sequence[str]) -> Bindings:
    for text in gin_params:
        if "." not in text.partition("=")[0]:
            raise UserError(f"--gin_param={text}: the checkpoint has no macros; bind Class.parameter = value")
    return {key: value for key, value in collect(gin_files, gin_params).items() if not value.of_base}


def _changed(run: RunConfig, bindings: Bindings) -> RunConfig:
    return build(to_bindings(run, "the checkpoint's config") | bindings)
