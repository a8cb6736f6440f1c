"""Which documents the commands of ancient history read, and how much of each."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from jaxtyping import Int

from meliad_like.data.subset import Documents, Subset, beginnings, random_order
from meliad_like.data.token_store import TokenStore
from meliad_like.errors import UserError


def choose(
    store: TokenStore,
    split_name: str,
    names: Sequence[str] = (),
    document_tokens: int | None = None,
    max_tokens: int | None = None,
) -> Documents:
    """Some documents of a split, or their beginnings.

    Args:
        names: names of the documents; none: all.
        document_tokens: number of tokens that are read of each document, from its beginning; None: all.
        max_tokens: largest number of tokens of all documents together, which are then a random subset, the same each
            time; None: no limit.

    Raises:
        UserError: there is no document of a name, or max_tokens is less than the first document that is drawn.
    """
    split = store.split(split_name)
    if unknown := set(names) - set(split.names):
        raise UserError(f"there is no document {min(unknown)!r} in the split {split_name} of {store.folder}")
    chosen = random_order(len(split))
    if names:
        chosen = np.asarray([index for index in chosen if split.names[index] in names])
    used = np.minimum(split.lengths[chosen], document_tokens or split.lengths.max())
    if max_tokens is not None:
        chosen = chosen[np.cumsum(used) <= max_tokens]
        if not len(chosen):
            raise UserError(f"max_tokens={max_tokens} is less than the first document's {used[0]} tokens")
    documents = Subset(split, np.sort(chosen))
    if document_tokens is None:
        return documents
    return beginnings(documents, store.vocabulary, document_tokens * len(chosen), shortest=document_tokens)


def whole_documents(documents: Any, most: int = 2) -> Callable[[int], Int[np.ndarray, " tokens"]]:
    """A function from a document's index to all its tokens; it keeps the documents that were read last, `most` of them.

    Strides of a document are read one after the other, so that each document is copied from the token store once.
    """
    return lru_cache(maxsize=most)(lambda document: documents.tokens(document, 0, int(documents.lengths[document])))
