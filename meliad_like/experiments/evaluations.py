"""What is measured of a trained row: by document, or by the protocols of the Shortformer paper."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh

from meliad_like.config import RunConfig
from meliad_like.data.readers import Concatenated
from meliad_like.data.subset import Documents
from meliad_like.data.token_store import TokenStore
from meliad_like.evaluation import protocols, report
from meliad_like.models.model import Model
from meliad_like.run.evaluator import make_evaluator

STRIDES_IN_WINDOW = 6
"""Of sliding windows; the paper's are of 512 new tokens in 3,072 (section 4.2)."""


def by_document(
    model: Model,
    params: Any,
    store: TokenStore,
    documents: Documents,
    mesh: Mesh,
    run: RunConfig,
    split: str,
    path: Path,
) -> dict[str, float]:
    """Every token of the documents, each read from its beginning with all that the model remembers.

    Args:
      model, params: the params are on the mesh.
      store: of the documents.
      documents: of a split of the store, or of a subset of it.
      mesh: where they are evaluated.
      run: how the documents are read.
      split: its name.
      path: of the JSON file for all figures, with a row for each document.
    """
    evaluation = make_evaluator(run, model, store, split, mesh, documents=documents)(params)
    report.write(evaluation, path)
    costs = {f"flops_{how}": flops for how, flops in model.flops_per_prediction.items()}
    return {name: getattr(evaluation, name) for name in report.FIGURES} | costs


def by_protocol(
    model: Model,
    params: Any,
    documents: Documents,
    few: Documents,
    mesh: Mesh,
    run: RunConfig,
    end_of_document: int,
) -> dict[str, float]:
    """The documents as one stream, one lane, as Shortformer's tables have it (sections 2 and 5).

    By disjoint segments, going on with what the model remembers (`perplexity`, `bits_per_byte`, `tokens_per_second`).
    By sliding windows, if the model remembers nothing (`sliding_...`): the paper slides no others, which predict no
    better for it. And a few tokens one by one, for their time alone (`single_tokens_per_second`): by decoding, or where
    nothing is remembered by a window for each.

    Args:
      documents: of a split, or of a part of it.
      few: whose tokens are predicted one by one, after a first window.
    """
    window = run.data.segment_length
    # A block's first token attends to itself at least.
    remembers = int(model.num_visible(np.array(model.config.window_length))) > 1

    def evaluate(
        documents: Documents, protocol: protocols.ProtocolName, stride: int | None = None
    ) -> protocols.ProtocolScore:
        return protocols.evaluate(
            model,
            params,
            Concatenated(documents, model.vocabulary_size, end_of_document),
            protocol,
            segment_length=window,
            mesh=mesh,
            stride=stride,
            loss_slice=run.training.loss_slice,
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
