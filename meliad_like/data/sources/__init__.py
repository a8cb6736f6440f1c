"""Kinds of sources of documents; `meliad_like.data.documents` chooses one by its config."""
