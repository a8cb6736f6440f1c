"""A file with a carry, so that reading a book can be interrupted and resumed."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meliad_like.errors import DAMAGED_NPZ, UserError
from meliad_like.generation.streaming import Reading
from meliad_like.remote import replacing
from meliad_like.resumable import check_same


def save_reading(path: str | Path, reading: Reading, unfinished: bytes, identity: dict[str, Any]) -> None:
    """Writes the file atomically: if it fails (a UserError), an earlier file is unchanged.

    Args:
      unfinished: bytes of an incomplete character at the end.
      identity: properties of the checkpoint that computed the carry, for JSON, which `load_reading` compares.
    """
    arrays = {name: np.asarray(leaf) for name, leaf in _named(reading.carry).items()}
    facts = {
        "identity": identity,
        "token": reading.token,
        "num_read": reading.num_read,
        "ended": reading.ended,
        "unfinished": unfinished.hex(),
    }
    try:
        with replacing(path) as file:
            np.savez(file, facts=np.array(json.dumps(facts)), key=np.asarray(reading.key), **arrays)
    except OSError as error:
        raise UserError(f"cannot write the carry to {path}: {error.strerror}") from None


def load_reading(path: str | Path, abstract_carry: Any, identity: dict[str, Any]) -> tuple[Reading, bytes]:
    """Reads a file of `save_reading` for the checkpoint with this identity: the state, and an incomplete character.

    Raises:
      UserError: the file is missing, unreadable or damaged, or it belongs to another checkpoint.
    """
    try:
        with np.load(path) as file:
            facts = json.loads(str(file["facts"]))
            check_same(
                path, facts["identity"], identity, way_out="choose the checkpoint that wrote it (--checkpoint, --step)"
            )
            # numpy loads bfloat16 as raw bytes.
            leaves = [file[name].view(leaf.dtype) for name, leaf in _named(abstract_carry).items()]
            key = file["key"]
    except FileNotFoundError:
        raise UserError(f"there is no saved carry {path}") from None
    except OSError as error:
        raise UserError(f"cannot read the saved carry {path}: {error.strerror}") from None
    except (*DAMAGED_NPZ, KeyError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is not a saved carry, or it is damaged") from None
    carry = jax.tree.unflatten(jax.tree.structure(abstract_carry), leaves)
    reading = Reading(jax.device_put(carry), facts["token"], jax.device_put(key), facts["num_read"], facts["ended"])
    return reading, bytes.fromhex(facts["unfinished"])


def _named(tree: Any) -> dict[str, Any]:
    leaves = jax.tree.leaves_with_path({"carry": tree})
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
