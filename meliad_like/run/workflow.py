"""From a config in Python to a trained model and its figures, in any thread; only the main thread handles signals."""

from pathlib import Path

from meliad_like.config import RunConfig
from meliad_like.data import preparation
from meliad_like.data.token_store import TokenStore
from meliad_like.errors import UserError
from meliad_like.evaluation.perplexity import make_evaluator
from meliad_like.evaluation.scores import Evaluation
from meliad_like.run import training
from meliad_like.run.opening import open_checkpoint, open_store


def prepare(run: RunConfig, *, workers: int = 1) -> TokenStore:
    """Makes the token store of a run (`run.data.store`), or opens it if it is there.

    Args:
      workers: the number of processes that read and tokenise; 0: one per core; 1: this process. A script that asks for
        others must do so under `if __name__ == "__main__":`, because they import it.

    Raises:
      UserError: the folder of the store is not named or holds something else, or a document is bad.
    """
    if not run.data.store:
        raise UserError("the config names no folder for the token store: set data.store")
    return preparation.prepare(run.source, run.vocabulary, run.data.store, workers, for_training=True)


def train(run: RunConfig, workdir: str | Path, *, load_dir: str | Path | None = None) -> None:
    """Trains to the last step, or resumes the training of this working folder, on all devices.

    Args:
      workdir: folder of the run: config, checkpoints, metrics; also on gs://.
      load_dir: checkpoint folder whose parameters a fresh run starts with.

    Raises:
      UserError: the config does not fit the documents, the devices or what is in the folder.
      SystemExit: after SIGTERM or Ctrl-C, with everything saved; the same call resumes.
    """
    if status := training.train(run, workdir, None if load_dir is None else str(load_dir)):
        raise SystemExit(status)


def evaluate(
    checkpoint: str | Path,
    split: str = "test",
    *,
    step: int | None = None,
    store: str | Path | None = None,
    max_tokens: int | None = None,
) -> Evaluation:
    """Evaluates a checkpoint on all documents of a split, on all devices.

    Args:
      checkpoint: checkpoint folder, or the working folder of a training.
      split: `train`, `validation` or `test`.
      step: which checkpoint; None: the newest that is not damaged.
      store: token store; None: the one that the model was trained with.
      max_tokens: the size of a random subset of the documents, the same each time; None: all.

    Raises:
      UserError: there is no such checkpoint or store, or they don't belong together.
    """
    opened = open_checkpoint(checkpoint, step=step, mesh="config")
    documents = open_store(opened, checkpoint, None if store is None else str(store), prepare=False)
    return make_evaluator(opened.run, opened.model, documents, split, opened.mesh, max_tokens=max_tokens)(opened.params)
