"""The figures of a trained row: by document, or by the protocols of the Shortformer paper."""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from meliad_like.config import RunConfig
from meliad_like.data.readers import Concatenated
from meliad_like.data.subset import Documents, beginnings
from meliad_like.data.token_store import TokenStore
from meliad_like.data.vocabulary import Vocabulary
from meliad_like.evaluation import protocols, report
from meliad_like.models.model import Model
from meliad_like.run.evaluator import make_evaluator

STRIDES_IN_WINDOW = 6
"""Sliding windows have a stride of a sixth; in the paper 512 of 3,072 tokens (section 4.2)."""


class Trained(NamedTuple):
    """A trained row, and what it is evaluated on."""

    run: RunConfig
    """How documents are read."""
    model: Model
    params: Any
    """On the mesh."""
    vocabulary: Vocabulary
    mesh: Mesh
    store: TokenStore
    split: str
    documents: Documents
    """The whole split, or a subset of it."""


def by_document(trained: Trained, path: Path) -> dict[str, float]:
    """Evaluates every token of the documents, each read from its beginning with all that the model remembers.

    Args:
      trained: the row.
      path: of the JSON file for all figures, with those of each document.
    """
    run, model, documents = trained.run, trained.model, trained.documents
    evaluator = make_evaluator(run, model, trained.store, trained.split, trained.mesh, documents=documents)
    evaluation = evaluator(trained.params)
    report.write(evaluation, path)
    costs = {f"flops_{how}": flops for how, flops in model.flops_per_prediction.items()}
    return {name: getattr(evaluation, name) for name in report.FIGURES} | costs


def by_protocol(trained: Trained, num_single: int) -> dict[str, float]:
    """Evaluates the documents as one stream in one lane, as in Shortformer's tables (sections 2 and 5).

    - By disjoint segments, with what the model remembers of those before (`perplexity`, `tokens_per_second`, ...).
    - By sliding windows, if the model remembers nothing (`sliding_...`); the paper slides no others, whose predictions
      it does not improve.
    - A few tokens one by one, for the speed alone (`single_tokens_per_second`): by decoding, or by a window for each
      token if the model remembers nothing.

    Args:
      trained: the row.
      num_single: the number of tokens that are predicted one by one, after a first window.
    """
    model, documents, window = trained.model, trained.documents, trained.run.data.segment_length
    few = beginnings(trained.store.split(trained.split), trained.vocabulary, window + num_single)
    # A block's first token attends to itself at least.
    remembers = int(model.config.num_visible(np.array(model.config.window_length))) > 1

    def evaluate(
        documents: Documents, protocol: protocols.ProtocolName, stride: int | None = None
    ) -> protocols.ProtocolScore:
        return protocols.evaluate(
            model,
            trained.params,
            Concatenated(documents, model.vocabulary_size, trained.vocabulary.end_of_document),
            protocol,
            segment_length=window,
            mesh=trained.mesh,
            stride=stride,
            loss_slice=trained.run.training.loss_slice,
        )

    score = evaluate(documents, "segments")
    num_bytes = int(np.sum(documents.num_bytes))
    figures = {
        "bits_per_token": score.bits_per_token,
        "perplexity": score.perplexity,
        "bits_per_byte": score.nats / math.log(2) / num_bytes,
        "tokens_per_second": score.tokens_per_second,
        "num_documents": len(documents.lengths),
        "num_tokens": score.num_tokens,
        "num_bytes": num_bytes,
    }
    if remembers:
        return figures | {"single_tokens_per_second": evaluate(few, "token_by_token").tokens_per_second}
    sliding = evaluate(documents, "sliding", max(window // STRIDES_IN_WINDOW, 1))
    single = evaluate(few, "sliding", 1)
    # The first window predicts all its tokens at once.
    num_windows = 1 + max(single.num_tokens - window, 0)
    return figures | {
        "sliding_perplexity": sliding.perplexity,
        "sliding_bits_per_byte": sliding.nats / math.log(2) / num_bytes,
        "sliding_tokens_per_second": sliding.tokens_per_second,
        "single_tokens_per_second": num_windows / single.seconds,
    }
