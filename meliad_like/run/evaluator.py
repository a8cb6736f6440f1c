"""The one place where evaluators are made: a run's config says how its documents are read."""

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
    max_tokens: int | None = None,
    whole_segments: bool = False,
) -> Evaluator:
    """An evaluator that reads documents as the run does: with its reader, segment length and number of lanes.

    Args:
      run: the config.
      model: without its parameters.
      store: of the documents.
      split: name of a split of the store.
      mesh: where the parameters and lanes are.
      documents: a subset of the split; None: all of it.
      max_tokens, whole_segments: as of `Evaluator`.

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
        max_tokens=max_tokens,
        loss_slice=run.training.loss_slice,
        whole_segments=whole_segments,
        read=run.data.evaluation_reader(store, split, run.model.window_length),
    )
