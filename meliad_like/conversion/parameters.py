"""Parts that conversions share: parameters from files of other programs, vocabularies, and our checkpoints."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from meliad_like.config import RunConfig
from meliad_like.data.token_store import TokenStore
from meliad_like.errors import UserError
from meliad_like.run.opening import checkpoint_metadata, save_vocabulary
from meliad_like.training.checkpoints import Checkpoints, named_arrays
from meliad_like.vocabularies.base import Vocabulary

NEWER_FIELDS = ("logit_bound", "embedding_scale", "tied_embedding", "norm_epsilon")
"""Fields of published models, which other programs' forms of our decoders lack."""


def fill(
    template: Any, names: Iterable[str], tensors: Callable[[str], Iterable[str]], make: Callable[[str], Any], owner: str
) -> Any:
    """Fills our parameters one after the other, so that only one additional array is in memory.

    Args:
      template: tree of the shapes and dtypes of our parameters.
      names: names of the arrays in the file; each must be used.
      tensors: the names of the arrays of which a parameter is made, by its path such as `layers/0/key/kernel`.
      make: makes a parameter, by its path.
      owner: the file or folder, for messages.

    Raises:
      UserError: an array is missing, has another shape, or has no place in the model.
    """
    names, leaves = frozenset(names), named_arrays(template)

    def place(path: str, leaf: Any) -> jax.Array:
        needed = list(tensors(path))
        for name in needed:
            if name not in names:
                raise UserError(f"{owner} has no tensor {name}: it is not the model that its config describes")
        if (array := make(path)).shape != leaf.shape:
            name = " + ".join(needed)
            raise UserError(f"{owner}: {name} has shape {array.shape}, its config asks for {leaf.shape}")
        # Copies are made in the background; wait, so that this array is freed before the next is read.
        return jax.block_until_ready(jnp.asarray(np.asarray(array, leaf.dtype, order="C")))

    # The largest array comes first, while most memory is free.
    largest_first = sorted(leaves, key=lambda path: -leaves[path].size)
    filled = {path: place(path, leaves[path]) for path in largest_first}
    if left_over := names - {name for path in leaves for name in tensors(path)}:
        number = f"({len(left_over)} such tensors)"
        raise UserError(f"{owner} has a tensor {min(left_over)} that the model of its config has no place for {number}")
    return jax.tree.unflatten(jax.tree.structure(template), [filled[path] for path in leaves])


def vocabulary_of(run: RunConfig, num_tokens: int, owner: str | Path) -> Vocabulary:
    """The vocabulary of a config, which must have the number of tokens of `owner`, because tokens keep their ids.

    One that would have to be trained is taken from the config's token store.
    """
    if not run.vocabulary.trained:
        vocabulary = run.vocabulary.make()
    elif run.data.store:
        vocabulary = TokenStore(run.data.store).vocabulary
    else:
        problem = "the vocabulary of the config would have to be trained"
        raise UserError(f"{problem}: set FileVocabularyConfig.model_file, or ReaderConfig.store to a store that has it")
    if vocabulary.size != num_tokens:
        problem = f"{owner} has {num_tokens} tokens and the vocabulary of the config {vocabulary.size}"
        unused = f"VocabularyConfig.size_multiple={num_tokens} if only unused ids are missing"
        raise UserError(f"{problem}: set FileVocabularyConfig.model_file, or {unused}")
    return vocabulary


def write_checkpoint(
    folder: epath.PathLike, params: Any, run: RunConfig, vocabulary: Vocabulary, step: int = 0
) -> None:
    """Writes parameters that come from elsewhere into a checkpoint folder, which must not have checkpoints yet."""
    with Checkpoints(folder) as checkpoints:
        if steps := checkpoints.steps():
            raise UserError(f"{folder} has checkpoints already (step {steps[-1]}): choose another --output")
        save_vocabulary(vocabulary, folder)
        state = {"step": jnp.asarray(step, jnp.int32), "params": params}
        checkpoints.save(step, state, checkpoint_metadata(run, vocabulary, step, None))
