"""A table at a scale, on some documents, in a folder: trained, timed and reported."""

import json
import math
import os
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from rich.table import Table as RichTable

from meliad_like import config
from meliad_like.config import RunConfig, with_changes
from meliad_like.config.run import stages_of
from meliad_like.data.memory_source import MemoryTasksSource
from meliad_like.data.preparation import prepare
from meliad_like.data.readers import label
from meliad_like.data.token_store import STORE_NAME, TokenStore
from meliad_like.data.tokenizers_vocabulary import TOKENIZER_NAME, TokenizersVocabularyConfig
from meliad_like.data.vocabulary import VOCABULARIES, saved_vocabulary_config
from meliad_like.errors import UserError
from meliad_like.evaluation.memory_map import by_model
from meliad_like.experiments.evaluations import by_document, by_protocol, facts
from meliad_like.experiments.maps import draw_maps, gather_maps, maps_to_markdown
from meliad_like.experiments.pictures import draw
from meliad_like.experiments.processes import run_processes
from meliad_like.experiments.report import (
    Results,
    gather,
    named_for,
    read_timing,
    result_file,
    scores_file,
    timing_file,
)
from meliad_like.experiments.scales import Scale, configure
from meliad_like.experiments.step_time import estimate, in_shares, make_step, time_in_turn
from meliad_like.experiments.tables import Row, Table
from meliad_like.mesh import make_mesh
from meliad_like.models.model import Model
from meliad_like.models.pretrained.config import DECODER_FIELDS, PretrainedConfig
from meliad_like.planning.topology import open_topology
from meliad_like.resumable import locked, write_json
from meliad_like.run.opening import VOCABULARY_FOLDER, checkpoints_folder, open_checkpoint, saved_config
from meliad_like.run.setup import vocabulary_size
from meliad_like.run.training import train
from meliad_like.training.metrics import FILE_NAME as METRICS_NAME

STEP_TIME = "step_time"
LOG_NAME = "log.txt"
HOW_TO_GET_ONE = (
    "python -m meliad_like.convert huggingface --input=FOLDER --output=DIR/checkpoints makes it from a folder of "
    "transformers, convert gguf from a GGUF file"
)


@dataclass(frozen=True)
class Experiment:
    """A table at one of its scales, and the folder of its runs and results."""

    table: Table
    scale_name: str
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
    jobs: int = 0
    """The number of runs at the same time; 0: one for each core if the scale's models are small, otherwise one."""
    repeats: int = 15
    """Rounds of timed steps."""
    only_step_time: bool = False
    topology: str = ""
    """TPUs for which the compiler estimates the time of the steps; "": they are timed on devices of this machine."""
    max_tokens: int | None = None
    """The most tokens to evaluate, of the beginnings of documents; None: as the scale says."""
    load_dir: str = ""
    """Checkpoint folder of the pretrained model, for a table whose rows begin with one."""
    command: tuple[str, ...] = ()
    """The command that starts this program again, without --worker."""
    failed: list[str] = field(default_factory=list)
    """Runs that failed."""

    @property
    def scale(self) -> Scale:
        """The table's scale of this name. Raises a UserError if there is none."""
        if self.scale_name not in self.table.scales:
            raise UserError(f"{self.table.name} has no scale {self.scale_name}; it has {', '.join(self.table.scales)}")
        return self.table.scales[self.scale_name]

    @cached_property
    def rows(self) -> list[Row]:
        """The rows to train, evaluate and time."""
        if self.chosen:
            return [self.table.row(name) for name in self.chosen]
        largest = self.scale.largest_vocabulary
        rows = [row for row in self.table.rows if self.scale_name == "paper" or not row.extra]
        return [row for row in rows if largest is None or row.vocabulary_size <= largest]

    @cached_property
    def _pretrained(self) -> dict[str, Any]:
        return fields_of(Path(self.load_dir)) if self.load_dir else {}

    def run(self, row: Row, seed: int) -> RunConfig:
        """The config of a row."""
        run = configure(row, self.scale, self.gin_files, self.gin_params, self._pretrained)
        changes: dict[str, Any] = {"training.seed": seed}
        if self.load_dir and "ReaderConfig.store" not in config.bound_by(self.gin_params):
            # The task's documents in another vocabulary than the task's.
            changes["data.store"] = f"{run.data.store}_{Path(self.load_dir).name}"
        return with_changes(run, changes)

    def work(self, worker: str) -> int:
        """Does the work of one of the processes that `make` starts; returns the exit status."""
        if worker == STEP_TIME:
            self._time_here()
            return 0
        name, seed = worker.split(",")
        first = self.table.row(name)
        for row in [first, *(row for row in self.rows if row.run_name == first.run_name and row != first)]:
            job = Job(self, row, int(seed))
            if not job.finished and (status := job.train_and_evaluate()):
                return status
        return 0

    @property
    def _side_by_side(self) -> int:
        return self.jobs or ((os.cpu_count() or 1) if self.scale.side_by_side else 1)

    def make(self) -> int:
        """Trains, evaluates and times what is not finished; returns the exit status, as of `run_processes`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # A job of some rows leaves the timing to the command for all rows; pretrained models are too large to be timed.
        not_timed = self.chosen or self.table.pretrained or self.timed
        status = 0 if self.only_step_time else self.train()
        if status or (not_timed and not self.only_step_time):
            return status
        # All in one process, with the environment of runs that are side by side.
        return self._start({STEP_TIME: (STEP_TIME, self.folder / f"{STEP_TIME}.log")})

    def train(self) -> int:
        """Trains and evaluates the unfinished runs, each in a process; makes token stores that don't exist."""
        # Seed by seed, so that there is a table of all rows early.
        jobs = [Job(self, row, seed) for seed in self.seeds for row in self.rows]
        runs = {job.workdir.name for job in jobs}
        pending: dict[str, Job] = {}  # one of the rows that share a run does the work of all
        for job in jobs:
            if not job.finished:
                pending.setdefault(job.workdir.name, job)
        for store, job in {job.trained.data.store: job for job in pending.values()}.items():
            if not (Path(store).expanduser() / STORE_NAME).exists():
                prepare(job.trained.source, job.trained.vocabulary, store)
        done = len(runs) - len(pending)
        print(f"{done} of {len(runs)} runs are finished; {self._side_by_side} side by side", flush=True)
        return self._start(
            {name: (f"{job.row.name},{job.seed}", job.workdir / LOG_NAME) for name, job in pending.items()}
        )

    def _start(self, workers: dict[str, tuple[str, Path]]) -> int:
        """Starts processes by name, each with the argument of --worker and the file for its output."""
        commands = {name: ([*self.command, f"--worker={worker}"], log) for name, (worker, log) in workers.items()}
        status, failed = run_processes(commands, self.folder, self._side_by_side)
        self.failed.extend(failed)
        return status

    @property
    def timed(self) -> bool:
        """Whether all rows have been timed; times of different processes can't be compared."""
        return {row.run_name for row in self.rows} <= read_timing(self.folder, self.topology).keys()

    def _time_here(self) -> None:
        runs = {row.run_name: self.run(row, seed=0) for row in self.rows}
        shares: dict[str, dict[str, float]] = {}
        names: dict[Any, str] = {}
        parts: dict[str, RunConfig] = {}
        for name, run in runs.items():
            for stage in (stages := stages_of(run)):
                # Stages that are the same in everything that takes time are timed once.
                same = stage.run.model, stage.run.data, stage.run.optimizer
                part = names.setdefault(same, name if len(stages) == 1 else f"{name}, stage {stage.index + 1}")
                parts.setdefault(part, stage.run)
                share = (stage.last_step - stage.first_step) / run.training.num_steps
                shares.setdefault(name, {})[part] = shares.get(name, {}).get(part, 0.0) + share
        if self.topology:
            self._estimate(runs, parts, shares)
            return
        steps = {}
        for part, run in parts.items():
            steps[part] = make_step(run, vocabulary_size(run), make_mesh(run.mesh))
            print(f"compiled {part} in {steps[part].compile_seconds:.1f} s", flush=True)
        timing = time_in_turn(steps, self.repeats)
        timing["rows"] = {
            name: facts(run, vocabulary_size(run)) | {"device": device_name()} | in_shares(timing["rows"], shares[name])
            for name, run in runs.items()
        }
        write_json(timing_file(self.folder), timing)

    def _estimate(
        self, runs: dict[str, RunConfig], parts: dict[str, RunConfig], shares: dict[str, dict[str, float]]
    ) -> None:
        """Estimates the rows that have no estimate yet; each is written at once, because compilers take minutes."""
        topology, done, found = open_topology(self.topology), read_timing(self.folder, self.topology), {}
        device = {"device": f"{len(topology.devices)} {topology.kind} ({self.topology}), as its compiler estimates"}
        for name, run in runs.items():
            if name in done:
                continue
            for part in shares[name].keys() - found.keys():
                found[part] = estimate(parts[part], vocabulary_size(run), topology)
                print(f"compiled {part} in {found[part]['compile_seconds']:.1f} s", flush=True)
            done[name] = facts(run, vocabulary_size(run)) | device | in_shares(found, shares[name])
            write_json(timing_file(self.folder, self.topology), {"rows": done})

    def results(self) -> Results:
        """The results that exist; UserError if there is no folder."""
        if not self.folder.is_dir():
            raise UserError(f"nothing was evaluated yet in {self.folder}: the same command without --report does that")
        return gather(self.table, self.folder, self.seeds, self.split, self.rows, self.topology)

    def report(self) -> str:
        """Writes Markdown, CSV and picture of the results that exist; returns the Markdown."""
        results, path = self.results(), self.folder / named_for(self.table.name, self.topology)
        markdown = results.to_markdown(self.scale_name)
        if self.table.is_map:
            maps = gather_maps(results.rows, self.folder, self.seeds, self.split)
            markdown += "\n" + maps_to_markdown(maps, self._block_length)
            draw_maps(maps, path.with_suffix(".png"))
            by_model(maps).to_csv(path.with_name(f"{path.name}_cells.csv"), index=False)
        else:
            draw(results, path.with_suffix(".png"))
        path.with_suffix(".md").write_text(markdown)
        results.frame.to_csv(path.with_suffix(".csv"), index=False)
        return markdown

    @property
    def _block_length(self) -> int:
        """The tokens in a block of filler, of a table of memory maps."""
        source = self.run(self.rows[0], self.seeds[0]).source
        if not isinstance(source, MemoryTasksSource):
            raise UserError(f"{self.table.name} needs the documents of memory_tasks: leave out --task")
        return source.block_length

    def for_terminal(self) -> RichTable:
        """The report, in few enough columns for a terminal."""
        return self.results().for_terminal().to_rich()


@dataclass(frozen=True)
class Job:
    """A training and its evaluation for a row with a seed, in a process and a folder of its own."""

    experiment: Experiment
    row: Row
    seed: int

    @cached_property
    def evaluated(self) -> RunConfig:
        """The run that is evaluated: the one that is trained, but for rows whose training is that of another row."""
        return self.experiment.run(self.row, self.seed)

    @cached_property
    def trained(self) -> RunConfig:
        """The run that is trained."""
        first = self.row.trained_as
        return self.experiment.run(self.experiment.table.row(first), self.seed) if first else self.evaluated

    @property
    def path(self) -> Path:
        """The file of the row's figures, in the folder of its run."""
        return result_file(self.experiment.folder, self.row, self.seed)

    @property
    def workdir(self) -> Path:
        return self.path.parent

    @property
    def max_tokens(self) -> int | None:
        return self.experiment.max_tokens or self.experiment.scale.max_tokens

    @property
    def result(self) -> dict[str, Any]:
        """The figures that `train_and_evaluate` has written so far."""
        return json.loads(self.path.read_text()) if self.path.exists() else {"splits": {}}

    @property
    def finished(self) -> bool:
        """Whether it is trained and evaluated on the split; UserError if the folder holds another run."""
        config.check_workdir(self.trained, self.workdir, "--folder")
        result = self.result
        done = result["splits"].get(self.experiment.split, {"max_tokens": math.nan})
        return done.get("max_tokens") == self.max_tokens and result["num_steps"] >= self.trained.training.num_steps

    def train_and_evaluate(self) -> int:
        """Trains (or resumes) in this process, evaluates the split, and adds the figures to the row's result.

        Returns the exit status of `run.training.train`, and raises its errors; also UserError if the split has no
        documents or another process works in this folder.
        """
        workdir, split, began = self.workdir, self.experiment.split, time.perf_counter()
        mesh = make_mesh(self.trained.mesh)
        workdir.mkdir(parents=True, exist_ok=True)
        with locked(workdir / "lock", f"another process is working in {workdir}: wait for it, or end it"):
            store = TokenStore(self.trained.data.store)
            store.split(split)
            if status := train(self.trained, workdir, self.experiment.load_dir or None, mesh=mesh):
                return status
            figures = self._evaluate(store, mesh)
            finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
            earlier = self.result
            same_steps = earlier.get("num_steps") == self.trained.training.num_steps
            result = facts(self.evaluated, vocabulary_size(self.evaluated)) | {
                "seed": self.seed,
                "device": device_name(),
                "seconds": time.perf_counter() - began,
                "logged_tokens_per_second": _logged_speed(workdir),
                "splits": (earlier["splits"] if same_steps else {}) | {split: finite | {"max_tokens": self.max_tokens}},
            }
            write_json(self.path, result)
        return 0

    def _evaluate(self, store: TokenStore, mesh: Mesh) -> dict[str, float]:
        experiment, best = self.experiment, self.workdir / "best"
        opened = open_checkpoint(best if self.trained.training.keep_best else self.workdir, mesh=mesh)
        opened = opened._replace(run=self.evaluated, model=Model(self.evaluated.model, opened.vocabulary.size))
        whole = store.split(experiment.split)
        documents = whole if self.max_tokens is None else whole.beginnings(opened.vocabulary, self.max_tokens)
        if experiment.table.by_protocol:
            num_single = self.evaluated.data.segment_length + experiment.scale.timed_tokens
            return by_protocol(opened, mesh, documents, whole.beginnings(opened.vocabulary, num_single))
        scores = scores_file(experiment.folder, self.row, self.seed, experiment.split)
        return by_document(opened, mesh, store, experiment.split, documents, scores)


def fields_of(folder: Path) -> dict[str, Any]:
    """The values that a pretrained model gives to fields of the decoder and the vocabulary, by `Class.field`."""
    if not folder.is_dir():
        raise UserError(f"there is no pretrained model at --load_dir={folder}: {HOW_TO_GET_ONE}")
    model, saved = saved_config(folder).model, checkpoints_folder(folder) / VOCABULARY_FOLDER
    vocabulary = saved_vocabulary_config(Path(saved))
    if not isinstance(model, PretrainedConfig) or not isinstance(vocabulary, TokenizersVocabularyConfig):
        held = f"{type(model).__name__} with a vocabulary of {VOCABULARIES.name_of(vocabulary)}"
        raise UserError(f"--load_dir={folder} holds {held}, not a pretrained model: {HOW_TO_GET_ONE}")
    values = config.bound_values(model)
    decoder = {name: values[name] for name in (f"PretrainedConfig.{field}" for field in DECODER_FIELDS)}
    decoder |= config.bound_values(model.rotary_scaling)
    return decoder | {
        "RunConfig.vocabulary": "tokenizers",
        "FileVocabularyConfig.model_file": str(Path(saved / TOKENIZER_NAME).absolute()),
        "TokenizersVocabularyConfig.end_token": vocabulary.end_token,
        "VocabularyConfig.size_multiple": vocabulary.size_multiple,
    }


def _logged_speed(folder: Path) -> float:
    """Tokens per second of a training step: the median of the logged ones."""
    lines = map(json.loads, (folder / METRICS_NAME).read_text().splitlines())
    kinds = [label("train", leaks) for leaks in (False, True)]
    return float(np.median([line["tokens_per_second"] for line in lines if line["kind"] in kinds]))


def device_name() -> str:
    """The name of this machine's device; for a CPU its number of cores."""
    device = jax.devices()[0]
    return f"CPU with {os.cpu_count()} cores" if device.platform == "cpu" else device.device_kind
