"""Texts for a trained model: prompts, beginnings of documents, and the identity that a saved carry must fit."""

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from meliad_like.config import bound_values
from meliad_like.data.token_store import TokenStore
from meliad_like.errors import UserError
from meliad_like.run.opening import OpenedCheckpoint
from meliad_like.sources.base import SPLITS
from meliad_like.vocabularies.base import UNKNOWN, Vocabulary, utf8_decoder

SAMPLED = 1000  # Number of values of each parameter that identify a checkpoint.


def carry_identity(opened: OpenedCheckpoint) -> dict[str, Any]:
    """The properties, for JSON, that a saved carry and its checkpoint must have in common."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(opened.params):
        # A sample of the parameters distinguishes two trainings, and is fast for large models.
        digest.update(np.asarray(leaf.reshape(-1)[:SAMPLED]).tobytes())
    return bound_values(opened.run.model) | {
        "step": opened.step,
        "vocabulary": opened.vocabulary.fingerprint,
        "parameters": digest.hexdigest(),
    }


class EncodedText(NamedTuple):
    """A text that is read."""

    tokens: Int[np.ndarray, " n"]
    num_bytes: int
    """The number of bytes of the text in UTF-8; if tokens were given, of what they decode to."""
    unfinished: bytes
    """The bytes of a character that the text, with what precedes it, does not complete."""


def encode_text(
    vocabulary: Vocabulary, text: str | Sequence[int] | np.ndarray, continues: bool = False, unfinished: bytes = b""
) -> EncodedText:
    """Encodes a text that begins a document or continues another one. Raises a UserError if the vocabulary has no token
    for one of the characters.

    Args:
      text: the text, or its tokens.
      unfinished: the bytes of an incomplete character before the text.
    """
    if isinstance(text, str):
        tokens, size = (vocabulary.encode_continuation if continues else vocabulary.encode)(text), len(text.encode())
        for character in sorted(set(text) - {UNKNOWN}) if not vocabulary.restores(text, tokens) else ():
            if vocabulary.lacks(character):
                problem = f"the vocabulary has no token for {character!r} (U+{ord(character):04X})"
                raise UserError(f"{problem}, which the prompt has at character {text.index(character)}: leave it out")
    else:
        tokens = np.asarray(text, np.int32)
        size = len((vocabulary.decode_bytes if continues else vocabulary.document_bytes)(tokens))
    decoder = utf8_decoder(unfinished)
    decoder.decode(vocabulary.decode_bytes(tokens))
    return EncodedText(tokens, size, decoder.getstate()[0])


def check_text(text: object) -> None:
    """Raises a UserError for an object that is neither a text nor its tokens, such as a file."""
    tokens = np.asarray([] if isinstance(text, str) else text)
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise UserError(f"a text is a str, or its tokens as a sequence of whole numbers, and not {type(text).__name__}")


def read_document(opened: OpenedCheckpoint, store: str | None, name: str, num_tokens: int) -> str:
    """The text of a document's first `num_tokens` tokens, without its end or half a character.

    It is looked for in `store` (None: the one that the model was trained with), among the documents held out first.
    """
    documents = TokenStore(store) if store else TokenStore(opened.run.data.store).read_by(opened.stores)
    documents.check_vocabulary(opened.vocabulary.fingerprint, "the checkpoint")
    splits = [documents.split(split) for split in reversed(SPLITS) if documents.totals(split).documents]
    for split in splits:
        if name in split.names:
            index = split.names.index(name)
            tokens = split.tokens(index, 0, min(num_tokens, int(split.lengths[index]) - 1))
            return opened.vocabulary.document_bytes(tokens).decode(errors="ignore")
    some = ", ".join(splits[0].names[:3])
    raise UserError(f"the token store {documents.folder} has no document {name!r}; it has {some}, ...")
