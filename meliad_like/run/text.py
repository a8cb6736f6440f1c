"""Texts for a trained model: prompts, beginnings of documents, and what a saved carry must fit."""

import hashlib
from typing import Any

import jax
import numpy as np

from meliad_like.config import bound_values
from meliad_like.data.documents import SPLITS
from meliad_like.data.token_store import TokenStore
from meliad_like.data.vocabulary import UNKNOWN, StreamingDecoder, Vocabulary
from meliad_like.errors import UserError
from meliad_like.run.opening import OpenedCheckpoint

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


def encode_prompt(vocabulary: Vocabulary, prompt: str) -> np.ndarray:
    """The tokens of a prompt, int32[n]. Raises a UserError if the vocabulary has no token for one of its characters."""
    tokens = vocabulary.encode(prompt)
    if not vocabulary.restores(prompt, tokens):
        for character in sorted(set(prompt) - {UNKNOWN}):
            if vocabulary.lacks(character):
                place = prompt.index(character)
                raise UserError(
                    f"the checkpoint's vocabulary has no token for {character!r} (U+{ord(character):04X}), which the "
                    f"prompt has at character {place}: leave it out"
                )
    return tokens


def read_document(opened: OpenedCheckpoint, store: str | None, name: str, num_tokens: int) -> str:
    """The text of a document's first `num_tokens` tokens, without its end or half a character.

    It is looked for in `store` (None: the one that the model was trained with), among the documents held out first.
    """
    documents = TokenStore(store or opened.run.data.store)
    documents.check_vocabulary(opened.vocabulary.fingerprint, "the checkpoint")
    splits = [documents.split(split) for split in reversed(SPLITS) if documents.totals(split).documents]
    for split in splits:
        if name in split.names:
            index = split.names.index(name)
            tokens = split.tokens(index, 0, min(num_tokens, int(split.lengths[index]) - 1))
            return "".join(map(StreamingDecoder(opened.vocabulary).push, tokens.tolist()))
    raise UserError(
        f"the token store {documents.folder} has no document {name!r}; it has {', '.join(splits[0].names[:3])}, ..."
    )
