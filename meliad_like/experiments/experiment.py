"""A table at a scale, on some documents, in a folder: trained, evaluated, timed and reported."""

import math
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

from meliad_like.config import RunConfig, check_workdir, with_changes
from meliad_like.data.preparation import prepare
from meliad_like.data.readers import label
from meliad_like.data.token_store import STORE_NAME, TokenStore
from meliad_like.errors import UserError
from meliad_like.experiments import report as reports
from meliad_like.experiments.evaluations import by_document, by_protocol, facts
from meliad_like.experiments.maps import write_maps
from meliad_like.experiments.pictures import draw
from meliad_like.experiments.pretrained import fields_of
from meliad_like.experiments.step_time import device_name, time_runs
from meliad_like.experiments.tables import Row, Scale, Settings, Table, configure
from meliad_like.mesh import make_mesh
from meliad_like.models.model import Model
from meliad_like.remote import write_whole
from meliad_like.resumable import locked, write_json
from meliad_like.run.opening import open_checkpoint, stores_read
from meliad_like.run.setup import vocabulary_size
from meliad_like.run.training import train
from meliad_like.training import metrics
from meliad_like.training.checkpoints import first_metadata


@dataclass(frozen=True)
class Experiment(Settings):
    """A table at one of its scales, and the folder of its runs and results."""

    table: Table = field(kw_only=True)
    seeds: tuple[int, ...] = (0, 1, 2)
    repeats: int = 15
    """Rounds of timed steps."""

    @property
    def scale(self) -> Scale:
        """The table's scale of this name. Raises a UserError if there is none."""
        if self.scale_name not in self.table.scales:
            raise UserError(f"{self.table.name} has no scale {self.scale_name}; it has {', '.join(self.table.scales)}")
        return self.table.scales[self.scale_name]

    @cached_property
    def rows(self) -> list[Row]:
        """The rows to train, evaluate and time."""
        if self.row_names:
            return [self.table.row(name) for name in self.row_names]
        largest = self.scale.largest_vocabulary
        rows = [row for row in self.table.rows if self.scale_name == "paper" or not row.extra]
        return [row for row in rows if largest is None or row.vocabulary_size <= largest]

    @cached_property
    def _pretrained(self) -> dict[str, Any]:
        return fields_of(Path(self.load_dir)) if self.load_dir else {}

    @property
    def _most_tokens(self) -> int | None:
        """The most tokens of the split to evaluate."""
        return self.max_tokens or self.scale.max_tokens

    def run(self, row: Row, seed: int) -> RunConfig:
        """The config of a row, with which it is evaluated."""
        run = configure(row, self.scale, self.gin_files, self.gin_params, self._pretrained)
        return with_changes(run, {"training.seed": seed, "data.store": self.store(run)})

    def trained_run(self, row: Row, seed: int) -> RunConfig:
        """The config with which a row is trained: its own, except for rows that share the training of another row."""
        return self.run(self.table.row(row.run_name), seed)

    def make(self, only_step_time: bool = False) -> tuple[int, list[str]]:
        """Trains, evaluates and times rows that are not finished, one after the other.

        Returns:
          0, or the exit status of `run.training.train` after a signal; and the names of the rows that failed.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished, failed = [] if only_step_time else self._unfinished(), []
        for number, (row, seed) in enumerate(unfinished, 1):
            name = f"{row.name}-{seed}"
            print(f"{name}, {number} of {len(unfinished)} that are not finished", flush=True)
            try:
                if status := self.make_row(row, seed):
                    return status, failed
            except UserError as error:
                print(f"failed {name}: {error}", flush=True)
                failed.append(name)
            # The next row has other programs.
            jax.clear_caches()
        # A job of some rows leaves the timing to the command for all rows; pretrained models are too large to be timed.
        if only_step_time or not (self.row_names or self.table.pretrained or self.timed):
            self.time_steps()
        return 0, failed

    def _unfinished(self) -> list[tuple[Row, int]]:
        """The rows that are not finished, seed by seed; makes their token stores if they don't exist."""
        rows = [(row, seed) for seed in self.seeds for row in self.rows if not self.finished(row, seed)]
        trained = (self.trained_run(*place) for place in rows)
        for store, run in {run.data.store: run for run in trained}.items():
            if not (Path(store).expanduser() / STORE_NAME).exists():
                prepare(run.source, run.vocabulary, store)
        return rows

    def finished(self, row: Row, seed: int) -> bool:
        """Whether a row is trained and evaluated on the split; UserError if the folder holds another run."""
        trained, result = self.trained_run(row, seed), reports.read_result(self.folder, row, seed)
        check_workdir(trained, reports.result_file(self.folder, row, seed).parent, "--folder")
        done = result["splits"].get(self.split, {"max_tokens": math.nan})
        return done.get("max_tokens") == self._most_tokens and result["num_steps"] >= trained.training.num_steps

    def make_row(self, row: Row, seed: int) -> int:
        """Trains (or resumes) a row in this process, evaluates the split, and adds the figures to the row's result.

        Returns the exit status of `run.training.train`, and raises its errors; also UserError if the split has no
        documents or another process works in this folder.
        """
        run, evaluated, began = self.trained_run(row, seed), self.run(row, seed), time.perf_counter()
        file, mesh = reports.result_file(self.folder, row, seed), make_mesh(run.mesh)
        workdir = file.parent
        busy = f"another process is working in {workdir}: wait for it, or end it"
        with locked(workdir / "lock", busy):
            store = TokenStore(run.data.store)
            store.split(self.split)
            if status := train(run, workdir, self.load_dir or None, mesh=mesh):
                return status
            store = store.read_by(stores_read(first_metadata(epath.Path(workdir) / "checkpoints")))
            figures = self._evaluate(row, seed, evaluated, store, mesh)
            finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
            earlier = reports.read_result(self.folder, row, seed)
            splits = earlier["splits"] if earlier.get("num_steps") == run.training.num_steps else {}
            result = facts(evaluated, vocabulary_size(evaluated)) | {
                "seed": seed,
                "device": device_name(),
                "seconds": time.perf_counter() - began,
                "logged_tokens_per_second": _logged_speed(workdir),
                "splits": splits | {self.split: finite | {"max_tokens": self._most_tokens, "store": store.fingerprint}},
            }
            write_json(file, result)
        return 0

    def _evaluate(self, row: Row, seed: int, run: RunConfig, store: TokenStore, mesh: Mesh) -> dict[str, float]:
        workdir = reports.result_file(self.folder, row, seed).parent
        opened = open_checkpoint(workdir / "best" if run.training.keep_best else workdir, mesh=mesh)
        opened = opened._replace(run=run, model=Model(run.model, opened.vocabulary.size))
        whole, most = store.split(self.split), self._most_tokens
        documents = whole if most is None else whole.beginnings(opened.vocabulary, most)
        if self.table.by_protocol:
            few = whole.beginnings(opened.vocabulary, run.data.segment_length + self.scale.timed_tokens)
            return by_protocol(opened, mesh, documents, few)
        path = reports.scores_file(self.folder, row, seed, self.split)
        return by_document(opened, mesh, store, self.split, documents, path)

    @property
    def timed(self) -> bool:
        """Whether all rows have been timed; times of different processes can't be compared."""
        return {row.run_name for row in self.rows} <= reports.read_timing(self.folder).keys()

    def time_steps(self) -> None:
        """Times the training steps of all rows."""
        runs = {row.run_name: self.trained_run(row, seed=0) for row in self.rows}
        write_json(self.folder / reports.TIMING_NAME, time_runs(runs, self.repeats))

    def results(self) -> reports.Results:
        """The results that exist; UserError if there is no folder."""
        if not self.folder.is_dir():
            raise UserError(f"nothing was evaluated yet in {self.folder}: the same command without --report does that")
        return reports.gather(self.table, self.folder, self.seeds, self.split, self.rows)

    def report(self) -> str:
        """Writes Markdown, CSV and picture of the results that exist; returns the Markdown."""
        results, path = self.results(), self.folder / self.table.name
        markdown = results.to_markdown(self.scale_name)
        if self.table.is_map:
            run = self.run(self.rows[0], self.seeds[0])
            markdown += "\n" + write_maps(results, run, self, self.seeds, path)
        else:
            draw(results, path.with_suffix(".png"))
        write_whole(path.with_suffix(".md"), markdown)
        write_whole(path.with_suffix(".csv"), results.frame.to_csv(index=False))
        return markdown


def _logged_speed(folder: Path) -> float:
    """Tokens per second of a training step: the median of the logged ones."""
    kinds = [label("train", leaks) for leaks in (False, True)]
    rows = metrics.read_rows(epath.Path(folder / metrics.FILE_NAME))
    return float(np.median([row["tokens_per_second"] for row in rows if row["kind"] in kinds]))
