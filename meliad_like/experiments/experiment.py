"""A table at a scale, on some documents, in a folder: trained, timed and reported."""

import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from meliad_like.config import RunConfig, with_changes
from meliad_like.config.stages import stages_of
from meliad_like.data.preparation import prepare
from meliad_like.data.token_store import STORE_NAME
from meliad_like.experiments import report
from meliad_like.experiments.jobs import (
    LOG_NAME,
    Job,
    device_name,
    environment,
    facts,
    run_processes,
    train_and_evaluate,
)
from meliad_like.experiments.pictures import draw
from meliad_like.experiments.pretrained import fields_of
from meliad_like.experiments.results import STEP_TIME_NAME, gather, read_timing, run_folder
from meliad_like.experiments.scales import Scale, configure
from meliad_like.experiments.step_time import TimedStep, in_shares, make_step, time_in_turn
from meliad_like.experiments.tables import Row, Table
from meliad_like.mesh import make_mesh
from meliad_like.resumable import write_json
from meliad_like.run.setup import vocabulary_size

STEP_TIME = "step_time"
Workers = dict[str, tuple[str, Path]]
"""Processes to start, by name: the argument of --worker, and the file for the output."""


@dataclass(frozen=True)
class Experiment:
    """A table at one of its scales, and the folder of its runs and results."""

    table: Table
    scale_name: str
    """One of the table's scales."""
    gin_files: tuple[str, ...]
    """The task, and options for all rows."""
    gin_params: tuple[str, ...]
    """Bindings for all rows; they are not scaled."""
    folder: Path
    """Contains a folder for each run, and the results."""
    seeds: tuple[int, ...]
    chosen: tuple[str, ...] = ()
    """Names of rows; none: all rows of the scale."""
    split: str = "test"
    """The split that is evaluated."""
    repeats: int = 15
    """Rounds of timed steps."""
    max_tokens: int | None = None
    """The most tokens to evaluate, of the beginnings of documents; None: as the scale says."""
    load_dir: str | None = None
    """Checkpoint folder of the pretrained model, for a table whose rows begin with one."""
    command: tuple[str, ...] = ()
    """The command that starts this program again, without --worker."""

    @property
    def scale(self) -> Scale:
        return self.table.scales[self.scale_name]

    @cached_property
    def rows(self) -> list[Row]:
        """The rows to train, evaluate and time."""
        if self.chosen:
            return [self.table.row(name) for name in self.chosen]
        largest = self.scale.largest_vocabulary
        rows = [row for row in self.table.rows if self.scale_name == "paper" or not row.extra]
        return [row for row in rows if largest is None or row.vocabulary_size <= largest]

    def job(self, row: Row, seed: int) -> Job:
        """
        Raises:
          UserError: the row, the files and the parameters make no run.
        """
        evaluated = self._run(row, seed)
        return Job(
            row,
            seed,
            run=self._run(self.table.row(row.trained_as), seed) if row.trained_as else evaluated,
            evaluated=evaluated,
            workdir=run_folder(self.folder, row, seed),
            by_protocol=self.table.by_protocol,
            max_tokens=self.scale.max_tokens if self.max_tokens is None else self.max_tokens,
            timed_tokens=self.scale.timed_tokens,
            load_dir=self.load_dir,
        )

    def _run(self, row: Row, seed: int) -> RunConfig:
        run = configure(row, self.scale, self.gin_files, self.gin_params, self._pretrained)
        changes: dict[str, Any] = {"training.seed": seed}
        if self.load_dir is not None and not any(param.startswith("ReaderConfig.store") for param in self.gin_params):
            # The task's documents in another vocabulary than the task's.
            changes["data.store"] = f"{run.data.store}_{Path(self.load_dir).name}"
        return with_changes(run, changes)

    @cached_property
    def _pretrained(self) -> dict[str, Any]:
        return {} if self.load_dir is None else fields_of(Path(self.load_dir))

    def work(self, worker: str) -> int:
        """Does the work of one of the processes that `train` and `time_steps` start; returns the exit status."""
        if worker == STEP_TIME:
            self._time_here()
            return 0
        name, seed = worker.split(",")
        first = self.table.row(name)
        for row in [first, *(row for row in self.rows if row.run_name == first.run_name and row != first)]:
            job = self.job(row, int(seed))
            if not job.finished(self.split) and (status := train_and_evaluate(job, self.split)):
                return status
        return 0

    def train(self, side_by_side: int, failed: list[str]) -> int:
        """Trains and evaluates the unfinished runs, each in a process; makes token stores that don't exist.

        Args:
          side_by_side: the number of runs at the same time.
          failed: runs that failed are added here.

        Returns:
          The exit status, as of `run_processes`.
        """
        # Seed by seed, so that there is a table of all rows early.
        jobs: dict[str, list[Job]] = {}  # of rows that share a run, by its folder
        for seed in self.seeds:
            for row in self.rows:
                job = self.job(row, seed)
                jobs.setdefault(job.workdir.name, []).append(job)
        unfinished = {name: [job for job in group if not job.finished(self.split)] for name, group in jobs.items()}
        pending = {name: group[0] for name, group in unfinished.items() if group}
        for store, job in {job.run.data.store: job for job in pending.values()}.items():
            if not (Path(store).expanduser() / STORE_NAME).exists():
                prepare(job.run.source, job.run.vocabulary, store)
        print(f"{len(jobs) - len(pending)} of {len(jobs)} runs are finished; {side_by_side} side by side", flush=True)
        workers = {name: (f"{job.row.name},{job.seed}", job.workdir / LOG_NAME) for name, job in pending.items()}
        return self._start(workers, side_by_side, failed)

    def time_steps(self, side_by_side: int, failed: list[str]) -> int:
        """Times the steps of all rows in one process, with the environment of runs that are side by side."""
        return self._start({STEP_TIME: (STEP_TIME, self.folder / f"{STEP_TIME}.log")}, side_by_side, failed)

    @property
    def timed(self) -> bool:
        """Whether all rows have been timed; times of different processes can't be compared."""
        return {row.run_name for row in self.rows} <= read_timing(self.folder).keys()

    def report(self) -> str:
        """Writes Markdown, CSV and picture of the results that exist; returns the Markdown."""
        results = gather(self.table, self.folder, self.seeds, self.split)
        # Extra rows that nobody asked for are not shown as missing.
        rows = [row for row in self.table.rows if results.num_runs(row) or row in self.rows or not row.extra]
        results = results._replace(rows=rows)
        markdown = report.to_markdown(self.table, results, report.notes(results, self.scale_name))
        (self.folder / f"{self.table.name}.md").write_text(markdown)
        report.write_csv(self.table, results, self.folder / f"{self.table.name}.csv")
        draw(self.table, results, self.folder / f"{self.table.name}.png")
        return markdown

    def _start(self, workers: Workers, side_by_side: int, failed: list[str]) -> int:
        began, done = time.perf_counter(), 0

        def report_end(name: str, status: int) -> None:
            nonlocal done
            done += 1
            if status:
                failed.append(f"{name} (see {workers[name][1]})")
            word = "failed" if status else "finished"
            print(f"{word} {name}, {done} of {len(workers)} after {time.perf_counter() - began:,.0f} s", flush=True)

        commands = {name: ([*self.command, f"--worker={worker}"], log) for name, (worker, log) in workers.items()}
        return run_processes(commands, side_by_side, environment(self.folder, side_by_side > 1), report_end)

    def _time_here(self) -> None:
        runs = {row.run_name: self._run(row, seed=0) for row in self.rows}
        steps: dict[str, TimedStep] = {}
        shares: dict[str, dict[str, float]] = {}
        for name, run in runs.items():
            for stage in (stages := stages_of(run)):
                # Stages that are the same in everything that takes time are timed once.
                same = (step for step in steps if _same_step(steps[step].run, stage.run))
                part = next(same, name if len(stages) == 1 else f"{name}, stage {stage.index + 1}")
                if part not in steps:
                    steps[part] = make_step(stage.run, vocabulary_size(run), make_mesh(run.mesh))
                    print(f"compiled {part} in {steps[part].compile_seconds:.1f} s", flush=True)
                share = (stage.last_step - stage.first_step) / run.training.num_steps
                shares.setdefault(name, {})[part] = shares.get(name, {}).get(part, 0.0) + share
        timing = time_in_turn(steps, self.repeats)
        timing["rows"] = {
            name: facts(run, vocabulary_size(run)) | {"device": device_name()} | in_shares(timing["rows"], shares[name])
            for name, run in runs.items()
        }
        write_json(self.folder / STEP_TIME_NAME, timing)


def _same_step(run: RunConfig, other: RunConfig) -> bool:
    return (run.model, run.data, run.optimizer) == (other.model, other.data, other.optimizer)
