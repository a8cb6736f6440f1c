"""The one place where evaluators are made: a run's config says how its documents are read."""

from typing import Any

from jax.sharding import Mesh

from meliad_like.config.run import RunConfig
from meliad_like.data.subset import Documents
from meliad_like.data.token_store import TokenStore
from meliad_like.evaluation.perplexity import Evaluator
from meliad_like.models.model import Model


def make_evaluator(
    run: RunConfig,
    model: Model,
    store: TokenStore,
    split: str,
    mesh: Mesh,
    *,
    documents: Documents | None = None,
    **others: Any,
) -> Evaluator:
    """An evaluator that reads documents as the run does: with its reader, segment length and number of lanes.

    Args:
      documents: a subset of the split; None: all of it.
      **others: other arguments of `Evaluator`, such as `max_tokens`.

    Raises:
      UserError: as `Evaluator`; or the split has no documents, or the reader can't read it.
    """
    return Evaluator(
        model,
        store.split(split) if documents is None else documents,
        mesh,
        name=split,
        segment_length=run.data.segment_length,
        max_lanes=run.data.num_lanes,
        loss_slice=run.training.loss_slice,
        read=run.data.evaluation_reader(store, split, run.model.window_length),
        **others,
    )
