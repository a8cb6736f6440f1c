"""Parts that conversions share: places of parameters in files of other programs, vocabularies, and our checkpoints."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

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


class Place(NamedTuple):
    """The place of one of our parameters in a file."""

    name: str
    """The name of the array."""
    transposed: bool = False
    """Whether the array is [out, in]. Our kernels are [in, out]."""
    part: int | None = None
    """The third of the array's last axis that it is: GPT-2 has queries, keys and values in one."""


Places = Callable[[str], Place]
"""The place of a parameter of ours with a path such as `layers/0/key/kernel`."""


def fill_parameters(
    template: Any, names: Iterable[str], places: Places, read: Callable[[str], np.ndarray], owner: str
) -> Any:
    """Fills our parameters one after the other, so that only one additional array is in memory.

    Args:
      template: tree of the shapes and dtypes of our parameters.
      names: names of the arrays in the file; each must be used.
      read: reads an array by its name.
      owner: the file or folder, for messages.

    Raises:
      UserError: an array is missing, has another shape, or has no place in the model.
    """
    leaves = named_arrays(template)

    def make(path: str) -> np.ndarray:
        name, transposed, part = places(path)
        array = read(name)
        if part is not None:
            size = leaves[path].shape[-1]
            if array.shape[-1] != 3 * size:
                raise UserError(f"{owner}: {name} has shape {array.shape}, its last axis should be {3 * size}")
            array = array[..., part * size : (part + 1) * size]
        return array.T if transposed else array

    return fill(template, names, lambda path: (places(path).name,), make, owner)


def fill(
    template: Any,
    names: Iterable[str],
    tensors: Callable[[str], Iterable[str]],
    make: Callable[[str], np.ndarray],
    owner: str,
) -> Any:
    """As `fill_parameters`, with functions from a parameter's path: the names of the arrays of which it is made, and
    the parameter itself."""
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


def to_tensors(places: Places, params: Any) -> dict[str, np.ndarray]:
    """The arrays of a file by name, made from our parameters; the inverse of `fill_parameters`."""
    arrays: dict[str, Any] = {}
    for path, leaf in named_arrays(params).items():
        name, transposed, part = places(path)
        value = np.asarray(leaf.T if transposed else leaf, order="C")
        if part is None:
            arrays[name] = value
        else:
            arrays.setdefault(name, [None] * 3)[part] = value
    return {name: np.concatenate(x, axis=-1) if isinstance(x, list) else x for name, x in arrays.items()}


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
