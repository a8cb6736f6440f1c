"""A row of a table with a seed: trained, evaluated on a split, and written with its figures."""

import math
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from etils import epath
from jax.sharding import Mesh

from meliad_like.config import RunConfig, check_workdir
from meliad_like.data.readers import label
from meliad_like.data.token_store import TokenStore
from meliad_like.experiments.evaluations import by_document, by_protocol, facts
from meliad_like.experiments.report import read_result, result_file, scores_file
from meliad_like.experiments.step_time import device_name
from meliad_like.experiments.tables import Row, Settings
from meliad_like.mesh import make_mesh
from meliad_like.models.model import Model
from meliad_like.resumable import locked, write_json
from meliad_like.run.opening import open_checkpoint, stores_read
from meliad_like.run.setup import vocabulary_size
from meliad_like.run.training import train
from meliad_like.training.checkpoints import first_metadata
from meliad_like.training.metrics import FILE_NAME as METRICS_NAME
from meliad_like.training.metrics import read_rows


class Job(NamedTuple):
    """A row with a seed, to be trained and evaluated."""

    row: Row
    seed: int
    trained: RunConfig
    """The config of the training, which may belong to another row."""
    evaluated: RunConfig
    settings: Settings
    max_tokens: int | None
    """The most tokens of the split to evaluate."""
    timed_tokens: int | None
    """The number of tokens that are evaluated one by one, of a table that is evaluated by protocol; None: of others."""

    @property
    def workdir(self) -> Path:
        return self._result_file.parent

    @property
    def _result_file(self) -> Path:
        return result_file(self.settings.folder, self.row, self.seed)

    def finished(self) -> bool:
        """Whether it is trained and evaluated on the split; UserError if the folder holds another run."""
        result = read_result(self.settings.folder, self.row, self.seed)
        check_workdir(self.trained, self.workdir, "--folder")
        done = result["splits"].get(self.settings.split, {"max_tokens": math.nan})
        return done.get("max_tokens") == self.max_tokens and result["num_steps"] >= self.trained.training.num_steps

    def make(self) -> int:
        """Trains (or resumes) in this process, evaluates the split, and adds the figures to the row's result.

        Returns the exit status of `run.training.train`, and raises its errors; also UserError if the split has no
        documents or another process works in this folder.
        """
        run, mesh, split, began = self.trained, make_mesh(self.trained.mesh), self.settings.split, time.perf_counter()
        busy = f"another process is working in {self.workdir}: wait for it, or end it"
        with locked(self.workdir / "lock", busy):
            store = TokenStore(run.data.store)
            store.split(split)
            if status := train(run, self.workdir, self.settings.load_dir or None, mesh=mesh):
                return status
            store = store.read_by(stores_read(first_metadata(epath.Path(self.workdir) / "checkpoints")))
            figures = self._evaluate(store, mesh)
            finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
            earlier = read_result(self.settings.folder, self.row, self.seed)
            splits = earlier["splits"] if earlier.get("num_steps") == run.training.num_steps else {}
            result = facts(self.evaluated, vocabulary_size(self.evaluated)) | {
                "seed": self.seed,
                "device": device_name(),
                "seconds": time.perf_counter() - began,
                "logged_tokens_per_second": _logged_speed(self.workdir),
                "splits": splits | {split: finite | {"max_tokens": self.max_tokens, "store": store.fingerprint}},
            }
            write_json(self._result_file, result)
        return 0

    def _evaluate(self, store: TokenStore, mesh: Mesh) -> dict[str, float]:
        run, split = self.evaluated, self.settings.split
        opened = open_checkpoint(self.workdir / "best" if run.training.keep_best else self.workdir, mesh=mesh)
        opened = opened._replace(run=run, model=Model(run.model, opened.vocabulary.size))
        whole = store.split(split)
        documents = whole if self.max_tokens is None else whole.beginnings(opened.vocabulary, self.max_tokens)
        if self.timed_tokens is not None:
            few = whole.beginnings(opened.vocabulary, run.data.segment_length + self.timed_tokens)
            return by_protocol(opened, mesh, documents, few)
        path = scores_file(self.settings.folder, self.row, self.seed, split)
        return by_document(opened, mesh, store, split, documents, path)


def _logged_speed(folder: Path) -> float:
    """Tokens per second of a training step: the median of the logged ones."""
    kinds = [label("train", leaks) for leaks in (False, True)]
    rows = read_rows(epath.Path(folder / METRICS_NAME))
    return float(np.median([row["tokens_per_second"] for row in rows if row["kind"] in kinds]))
