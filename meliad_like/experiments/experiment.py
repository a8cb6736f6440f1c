"""A table at a scale, on some documents, in a folder: trained, timed and reported."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax

from meliad_like.config import RunConfig, with_changes
from meliad_like.data.preparation import prepare
from meliad_like.data.token_store import STORE_NAME
from meliad_like.errors import UserError
from meliad_like.experiments.job import Job
from meliad_like.experiments.maps import write_maps
from meliad_like.experiments.pictures import draw
from meliad_like.experiments.pretrained import fields_of
from meliad_like.experiments.report import Results, gather, read_timing, timing_file
from meliad_like.experiments.step_time import time_runs
from meliad_like.experiments.tables import Row, Scale, Settings, Table, configure
from meliad_like.experiments.tables.table import bound_by
from meliad_like.remote import write_whole
from meliad_like.resumable import write_json


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

    def run(self, row: Row, seed: int) -> RunConfig:
        """The config of a row, with which it is evaluated."""
        run = configure(row, self.scale, self.gin_files, self.gin_params, self._pretrained)
        changes: dict[str, Any] = {"training.seed": seed}
        if self.load_dir and "ReaderConfig.store" not in bound_by(self.gin_params):
            # The task's documents in another vocabulary than the task's.
            changes["data.store"] = f"{run.data.store}_{Path(self.load_dir).name}"
        return with_changes(run, changes)

    def trained_run(self, row: Row, seed: int) -> RunConfig:
        """The config with which a row is trained: its own, except for rows that share the training of another row."""
        return self.run(self.table.row(row.run_name), seed)

    def job(self, row: Row, seed: int) -> Job:
        """A row with a seed."""
        max_tokens = self.max_tokens or self.scale.max_tokens
        timed_tokens = self.scale.timed_tokens if self.table.by_protocol else None
        runs = self.trained_run(row, seed), self.run(row, seed)
        return Job(row, seed, *runs, settings=self, max_tokens=max_tokens, timed_tokens=timed_tokens)

    def make(self, only_step_time: bool = False) -> tuple[int, list[str]]:
        """Trains, evaluates and times rows that are not finished, one after the other.

        Returns:
          0, or the exit status of `run.training.train` after a signal; and the names of the rows that failed.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished, failed = [] if only_step_time else self._unfinished(), []
        for number, job in enumerate(unfinished, 1):
            name = f"{job.row.name}-{job.seed}"
            print(f"{name}, {number} of {len(unfinished)} that are not finished", flush=True)
            try:
                if status := job.make():
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

    def _unfinished(self) -> list[Job]:
        """The jobs that are not finished, seed by seed; makes their token stores if they don't exist."""
        jobs = [job for seed in self.seeds for row in self.rows if not (job := self.job(row, seed)).finished()]
        runs = {job.trained.data.store: job.trained for job in jobs}
        for store, run in runs.items():
            if not (Path(store).expanduser() / STORE_NAME).exists():
                prepare(run.source, run.vocabulary, store)
        return jobs

    @property
    def timed(self) -> bool:
        """Whether all rows have been timed; times of different processes can't be compared."""
        return {row.run_name for row in self.rows} <= read_timing(self.folder).keys()

    def time_steps(self) -> None:
        """Times the training steps of all rows."""
        runs = {row.run_name: self.trained_run(row, seed=0) for row in self.rows}
        write_json(timing_file(self.folder), time_runs(runs, self.repeats))

    def results(self) -> Results:
        """The results that exist; UserError if there is no folder."""
        if not self.folder.is_dir():
            raise UserError(f"nothing was evaluated yet in {self.folder}: the same command without --report does that")
        return gather(self.table, self.folder, self.seeds, self.split, self.rows)

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
