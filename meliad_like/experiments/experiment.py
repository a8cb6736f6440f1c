"""A table at a scale, on some documents, in a folder: trained, timed and reported."""

import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

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
    write_json,
)
from meliad_like.experiments.results import STEP_TIME_NAME, gather, read_timing, run_folder
from meliad_like.experiments.scales import SCALES, configure
from meliad_like.experiments.step_time import make_step, time_in_turn
from meliad_like.experiments.tables import Row, Table
from meliad_like.training.mesh import make_mesh
from meliad_like.training.setup import vocabulary_size

STEP_TIME = "step_time"
Workers = dict[str, tuple[str, Path]]
"""What to start, by name: the argument of --worker, and the file for the output."""


@dataclass(frozen=True)
class Experiment:
    table: Table
    scale_name: str
    """One of SCALES."""
    gin_files: tuple[str, ...]
    """The task, and options for all rows."""
    gin_params: tuple[str, ...]
    """For all rows, and never scaled."""
    folder: Path
    """Has a folder for each run, and the results."""
    seeds: tuple[int, ...]
    chosen: tuple[str, ...] = ()
    """Names of rows; none: all whose vocabulary the scale is meant for."""
    split: str = "test"
    """Whose documents decide."""
    repeats: int = 15
    """Rounds of timed steps."""
    command: tuple[str, ...] = ()
    """What starts this program again, but for --worker."""

    @cached_property
    def rows(self) -> list[Row]:
        """Those to be worked on."""
        if self.chosen:
            return [self.table.row(name) for name in self.chosen]
        largest = SCALES[self.scale_name].largest_vocabulary
        return [row for row in self.table.rows if largest is None or row.vocabulary_size <= largest]

    def job(self, row: Row, seed: int) -> Job:
        """
        Raises:
          UserError: the row, the files and the parameters make no run.
        """
        params = [f"TrainingConfig.seed = {seed}", *self.gin_params]
        run = configure(row, SCALES[self.scale_name], self.gin_files, params)
        return Job(row, seed, run, run_folder(self.folder, row, seed))

    def work(self, worker: str) -> int:
        """One of what `train` and `time_steps` start; the exit status."""
        if worker == STEP_TIME:
            self._time_here()
            return 0
        name, seed = worker.split(",")
        return train_and_evaluate(self.job(self.table.row(name), int(seed)), self.split)

    def train(self, side_by_side: int, failed: list[str]) -> int:
        """Trains and evaluates what is not finished, a process each; makes token stores that are not there.

        Args:
          side_by_side: runs at the same time.
          failed: what went wrong is added here.

        Returns:
          The exit status, as of `run_processes`.
        """
        # Seed by seed, so that a table of all rows is there early.
        jobs: dict[str, Job] = {}
        for seed in self.seeds:
            for row in self.rows:
                job = self.job(row, seed)
                jobs.setdefault(job.workdir.name, job)  # of rows that share a run, the first
        pending = {name: job for name, job in jobs.items() if not job.finished(self.split)}
        for store, job in {job.run.data.store: job for job in pending.values()}.items():
            if not (Path(store).expanduser() / STORE_NAME).exists():
                prepare(job.run.source, job.run.vocabulary, store)
        print(f"{len(jobs) - len(pending)} of {len(jobs)} runs are finished; {side_by_side} side by side", flush=True)
        workers = {name: (f"{job.row.name},{job.seed}", job.workdir / LOG_NAME) for name, job in pending.items()}
        return self._start(workers, side_by_side, failed)

    def time_steps(self, side_by_side: int, failed: list[str]) -> int:
        """Times the steps of all rows in one process, with the settings that runs side by side have."""
        return self._start({STEP_TIME: (STEP_TIME, self.folder / f"{STEP_TIME}.log")}, side_by_side, failed)

    @property
    def timed(self) -> bool:
        """Whether the times of all rows are there; they come from one process, or can't be compared."""
        return {row.run_name for row in self.rows} <= read_timing(self.folder).keys()

    def report(self) -> str:
        """Writes Markdown, CSV and picture of what is there for all rows of the table; returns the Markdown."""
        results = gather(self.table, self.folder, self.seeds, self.split)
        markdown = report.to_markdown(self.table, results, report.notes(results, self.scale_name))
        (self.folder / f"{self.table.name}.md").write_text(markdown)
        report.write_csv(self.table, results, self.folder / f"{self.table.name}.csv")
        report.draw(self.table, results, self.folder / f"{self.table.name}.png")
        return markdown

    def _start(self, workers: Workers, side_by_side: int, failed: list[str]) -> int:
        began, done = time.perf_counter(), 0

        def say(name: str, status: int) -> None:
            nonlocal done
            done += 1
            if status:
                failed.append(f"{name} (see {workers[name][1]})")
            word = "failed" if status else "finished"
            print(f"{word} {name}, {done} of {len(workers)} after {time.perf_counter() - began:,.0f} s", flush=True)

        commands = {name: ([*self.command, f"--worker={worker}"], log) for name, (worker, log) in workers.items()}
        return run_processes(commands, side_by_side, environment(self.folder, side_by_side > 1), say)

    def _time_here(self) -> None:
        steps = {}
        for row in self.rows:
            if row.run_name not in steps:
                run = self.job(row, seed=0).run
                steps[row.run_name] = make_step(run, vocabulary_size(run), make_mesh(run.mesh))
                print(f"compiled {row.run_name} in {steps[row.run_name].compile_seconds:.1f} s", flush=True)
        timing = time_in_turn(steps, self.repeats)
        for name, step in steps.items():
            timing["rows"][name] = facts(step.run, step.model) | {"device": device_name()} | timing["rows"][name]
        write_json(self.folder / STEP_TIME_NAME, timing)
