"""A table at a scale, on some documents, in a folder: trained, timed and reported."""

import dataclasses
import math
import os
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh

from meliad_like import config
from meliad_like.caches import without_compiled_programs
from meliad_like.config import RunConfig, with_changes
from meliad_like.config.run import stages_of
from meliad_like.data.preparation import prepare
from meliad_like.data.readers import label
from meliad_like.data.token_store import STORE_NAME, TokenStore
from meliad_like.data.tokenizers_vocabulary import TOKENIZER_NAME, TokenizersVocabularyConfig
from meliad_like.data.vocabulary import VOCABULARIES, saved_vocabulary_config
from meliad_like.errors import UserError
from meliad_like.experiments.evaluations import by_document, by_protocol, facts
from meliad_like.experiments.maps import draw_maps, gather_maps, maps_to_markdown
from meliad_like.experiments.pictures import draw
from meliad_like.experiments.report import (
    Results,
    gather,
    read_result,
    read_timing,
    result_file,
    scores_file,
    timing_file,
)
from meliad_like.experiments.step_time import TimedStep, in_shares, time_in_turn
from meliad_like.experiments.tables import Row, Scale, Settings, Table, configure
from meliad_like.mesh import make_mesh
from meliad_like.models.model import Model
from meliad_like.models.pretrained.config import DECODER_FIELDS, PretrainedConfig
from meliad_like.remote import write_whole
from meliad_like.resumable import locked, write_json
from meliad_like.run.opening import VOCABULARY_FOLDER, checkpoints_folder, open_checkpoint, saved_config
from meliad_like.run.setup import vocabulary_size
from meliad_like.run.training import train
from meliad_like.studies.map_tables import by_model
from meliad_like.studies.memory_source import MemoryTasksSource
from meliad_like.training.metrics import FILE_NAME as METRICS_NAME
from meliad_like.training.metrics import read_rows

HOW_TO_GET_ONE = (
    "python -m meliad_like.convert huggingface --input=FOLDER --output=DIR/checkpoints makes it from a folder of "
    "transformers"
)


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
        if self.load_dir and "ReaderConfig.store" not in config.bound_by(self.gin_params):
            # The task's documents in another vocabulary than the task's.
            changes["data.store"] = f"{run.data.store}_{Path(self.load_dir).name}"
        return with_changes(run, changes)

    def trained_run(self, row: Row, seed: int) -> RunConfig:
        """The config with which a row is trained: its own, but for rows whose training is that of another row."""
        return self.run(self.table.row(row.run_name), seed)

    def make(self, only_step_time: bool = False) -> tuple[int, list[str]]:
        """Trains, evaluates and times what is not finished, one row after the other.

        Returns:
          0, or the exit status of `run.training.train` after a signal; and the names of the rows that failed.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished, failed = [] if only_step_time else self._unfinished(), []
        for number, (row, seed) in enumerate(unfinished, 1):
            name = f"{row.name}-{seed}"
            print(f"{name}, {number} of {len(unfinished)} that are not finished", flush=True)
            try:
                if status := self.train_and_evaluate(row, seed):
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
        """The rows and seeds that are not finished, seed by seed; makes their token stores if they don't exist."""
        places = [(row, seed) for seed in self.seeds for row in self.rows if not self.finished(row, seed)]
        runs = {run.data.store: run for run in (self.trained_run(*place) for place in places)}
        for store, run in runs.items():
            if not (Path(store).expanduser() / STORE_NAME).exists():
                prepare(run.source, run.vocabulary, store)
        return places

    def finished(self, row: Row, seed: int) -> bool:
        """Whether a row is trained and evaluated on the split; UserError if the folder holds another run."""
        run, result = self.trained_run(row, seed), read_result(self.folder, row, seed)
        config.check_workdir(run, result_file(self.folder, row, seed).parent, "--folder")
        done = result["splits"].get(self.split, {"max_tokens": math.nan})
        return done.get("max_tokens") == self._max_tokens and result["num_steps"] >= run.training.num_steps

    @property
    def _max_tokens(self) -> int | None:
        return self.max_tokens or self.scale.max_tokens

    def train_and_evaluate(self, row: Row, seed: int) -> int:
        """Trains (or resumes) in this process, evaluates the split, and adds the figures to the row's result.

        Returns the exit status of `run.training.train`, and raises its errors; also UserError if the split has no
        documents or another process works in this folder.
        """
        run, path, began = self.trained_run(row, seed), result_file(self.folder, row, seed), time.perf_counter()
        workdir, mesh = path.parent, make_mesh(run.mesh)
        with locked(workdir / "lock", f"another process is working in {workdir}: wait for it, or end it"):
            store = TokenStore(run.data.store)
            store.split(self.split)
            if status := train(run, workdir, self.load_dir or None, mesh=mesh):
                return status
            figures = self._evaluate(row, seed, store, mesh)
            finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
            earlier, evaluated = read_result(self.folder, row, seed), self.run(row, seed)
            splits = earlier["splits"] if earlier.get("num_steps") == run.training.num_steps else {}
            result = facts(evaluated, vocabulary_size(evaluated)) | {
                "seed": seed,
                "device": device_name(),
                "seconds": time.perf_counter() - began,
                "logged_tokens_per_second": _logged_speed(workdir),
                "splits": splits | {self.split: finite | {"max_tokens": self._max_tokens}},
            }
            write_json(path, result)
        return 0

    def _evaluate(self, row: Row, seed: int, store: TokenStore, mesh: Mesh) -> dict[str, float]:
        run, workdir = self.run(row, seed), result_file(self.folder, row, seed).parent
        opened = open_checkpoint(workdir / "best" if run.training.keep_best else workdir, mesh=mesh)
        opened = opened._replace(run=run, model=Model(run.model, opened.vocabulary.size))
        whole = store.split(self.split)
        documents = whole if self._max_tokens is None else whole.beginnings(opened.vocabulary, self._max_tokens)
        if self.table.by_protocol:
            num_single = run.data.segment_length + self.scale.timed_tokens
            return by_protocol(opened, mesh, documents, whole.beginnings(opened.vocabulary, num_single))
        return by_document(opened, mesh, store, self.split, documents, scores_file(self.folder, row, seed, self.split))

    @property
    def timed(self) -> bool:
        """Whether all rows have been timed; times of different processes can't be compared."""
        return {row.run_name for row in self.rows} <= read_timing(self.folder).keys()

    def time_steps(self) -> None:
        """Times the training steps of all rows."""
        runs = {row.run_name: self.trained_run(row, seed=0) for row in self.rows}
        shares: dict[str, dict[str, float]] = {}
        parts: dict[Any, tuple[str, RunConfig]] = {}
        for name, run in runs.items():
            shares[name] = {}
            for stage in (stages := stages_of(run)):
                # Stages that are the same in everything that takes time are timed once.
                training = dataclasses.replace(stage.run.training, num_steps=1)
                same = stage.run.model, stage.run.data, stage.run.optimizer, training
                stage_name = name if len(stages) == 1 else f"{name}, stage {stage.index + 1}"
                part, _ = parts.setdefault(same, (stage_name, stage.run))
                share = (stage.last_step - stage.first_step) / run.training.num_steps
                shares[name][part] = shares[name].get(part, 0.0) + share
        steps = {}
        for part, run in parts.values():
            # The time to compile is one of the figures.
            with without_compiled_programs():
                steps[part] = TimedStep(run, vocabulary_size(run), make_mesh(run.mesh))
            print(f"compiled {part} in {steps[part].compile_seconds:.1f} s", flush=True)
        timing = time_in_turn(steps, self.repeats)
        timing["rows"] = {
            name: facts(run, vocabulary_size(run)) | {"device": device_name()} | in_shares(timing["rows"], shares[name])
            for name, run in runs.items()
        }
        write_json(timing_file(self.folder), timing)

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
            maps = gather_maps(results.rows, self.folder, self.seeds, self.split)
            markdown += "\n" + maps_to_markdown(maps, self._block_length)
            draw_maps(maps, path.with_suffix(".png"))
            write_whole(path.with_name(f"{path.name}_cells.csv"), by_model(maps).to_csv(index=False))
        else:
            draw(results, path.with_suffix(".png"))
        write_whole(path.with_suffix(".md"), markdown)
        write_whole(path.with_suffix(".csv"), results.frame.to_csv(index=False))
        return markdown

    @property
    def _block_length(self) -> int:
        """The tokens in a block of filler, of a table of memory maps."""
        source = self.run(self.rows[0], self.seeds[0]).source
        if not isinstance(source, MemoryTasksSource):
            raise UserError(f"{self.table.name} needs the documents of memory_tasks: leave out --task")
        return source.block_length


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
    kinds = [label("train", leaks) for leaks in (False, True)]
    rows = read_rows(epath.Path(folder / METRICS_NAME))
    return float(np.median([row["tokens_per_second"] for row in rows if row["kind"] in kinds]))


def device_name() -> str:
    """The name of this machine's device; for a CPU its number of cores."""
    device = jax.devices()[0]
    return f"CPU with {os.cpu_count()} cores" if device.platform == "cpu" else device.device_kind
