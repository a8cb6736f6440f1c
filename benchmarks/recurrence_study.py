r"""Is one recurrent layer worth more than one more ordinary layer? Slide:13L against Rec:fixed:skip, in pairs of seeds.

    python -m meliad_like.prepare --gin_file=task/standard_library.gin \
        --store=runs/recurrence_study/stores/standard_library
    python benchmarks/recurrence_study.py --jobs=2

On a CPU two runs with one thread each are faster than one run with two threads.

Each run sees the same documents in the same order as its partner. The folder contains a token store for each task
(`python -m meliad_like.prepare`), a working folder for each run, and at the end `study.json` and `study.png`. Finished
runs are skipped; the others resume from their last checkpoint.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
from absl import app, flags
from matplotlib.figure import Figure

from meliad_like.experiments.report import RESULT_NAME
from meliad_like.resumable import write_json
from meliad_like.studies.frames import with_error
from meliad_like.studies.pictures import read_metrics
from meliad_like.tables import Table

ROWS = ("slide_13l", "fixed_skip")
SPLITS = ("validation", "test")
VARIANTS = (
    ("slide_13l", "trained"),
    ("fixed_skip", "trained"),
    ("fixed_skip", "states cleared each segment"),
    ("fixed_skip", "states cleared each block"),
)

FOLDER = flags.DEFINE_string("folder", "runs/recurrence_study", "Where stores, runs and results lie.")
TASKS = flags.DEFINE_list(
    "tasks", ["standard_library"], "Files in gin/task; the token store of each: FOLDER/stores/TASK."
)
SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds of parameters and of the order of documents.")
JOBS = flags.DEFINE_integer("jobs", 1, "Runs side by side on this machine.", lower_bound=1)
GIN_PARAM = flags.DEFINE_multi_string("gin_param", [], "Bindings for all runs.")
ONE = flags.DEFINE_string("one", None, "Used by the program itself: the one run TASK,ROW,SEED.")


def name_of(task: str, row: str, seed: str) -> str:
    return f"{task}-{row}-{seed}"


def one_run(task: str, row: str, seed: str) -> None:
    """Trains, then evaluates: as trained and, with a recurrent layer, with states cleared at each segment or block."""
    from meliad_like import config
    from meliad_like.data.token_store import TokenStore
    from meliad_like.evaluation.perplexity import Evaluator
    from meliad_like.mesh import make_mesh
    from meliad_like.models.decoder import DecoderConfig
    from meliad_like.models.model import Model
    from meliad_like.run.opening import open_checkpoint
    from meliad_like.run.training import train
    from meliad_like.studies.interventions import cleared

    folder = Path(FOLDER.value)
    store = TokenStore(folder / "stores" / task)
    params = [f"ReaderConfig.store='{store.folder}'", f"TrainingConfig.seed={seed}", *GIN_PARAM.value]
    run = config.parse([f"task/{task}.gin", "recurrence_study.gin", f"block_recurrent/{row}.gin"], params)
    workdir = folder / name_of(task, row, seed)
    if status := train(run, workdir):
        sys.exit(status)
    mesh = make_mesh(run.mesh)
    opened = open_checkpoint(workdir, mesh=mesh)
    variants = {"trained": (opened.model, run.data.segment_length)}
    assert isinstance(run.model, DecoderConfig)
    if (clearing := cleared(run.model)) is not None:
        clearing = Model(clearing, opened.model.vocabulary_size)
        variants["states cleared each segment"] = (clearing, run.data.segment_length)
        variants["states cleared each block"] = (clearing, run.model.window_length)
    results = {}
    for (variant, (model, segment_length)), split in product(variants.items(), SPLITS):
        evaluator = Evaluator(
            model, store.split(split), mesh, name=split, segment_length=segment_length, max_lanes=8, whole_segments=True
        )
        evaluation = evaluator(opened.params)
        results.setdefault(variant, {})[split] = {
            "bits_per_byte": evaluation.bits_per_byte,
            "documents": {d.name: d.bits_per_byte for d in evaluation.documents},
            "positions": [[p.start, p.bits_per_token] for p in evaluation.positions],
        }
    write_json(workdir / RESULT_NAME, results)


def run_all() -> int:
    """Starts every run that has no result, `jobs` at a time, each in a process of its own; the exit status."""
    folder = Path(FOLDER.value)
    arguments = [f"--folder={folder}", *(f"--gin_param={value}" for value in GIN_PARAM.value)]
    commands = {}
    for run in product(TASKS.value, ROWS, SEEDS.value):
        workdir = folder / name_of(*run)
        if not (workdir / RESULT_NAME).exists():
            command = [sys.executable, __file__, *arguments, f"--one={','.join(run)}"]
            commands[workdir] = command
    # Two runs at the same time with one thread each are faster than one after the other with two threads.
    one_thread = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"} if JOBS.value > 1 else {}

    def start(workdir: Path) -> int:
        workdir.mkdir(parents=True, exist_ok=True)
        with (workdir / "log.txt").open("a") as log:
            return subprocess.run(commands[workdir], stdout=log, stderr=log, env=one_thread | os.environ).returncode

    with ThreadPoolExecutor(JOBS.value) as pool:
        return max(pool.map(start, commands), default=0)


def read_results() -> dict[str, dict]:
    folder = Path(FOLDER.value)
    runs = product(TASKS.value, ROWS, SEEDS.value)
    return {name_of(*run): json.loads((folder / name_of(*run) / RESULT_NAME).read_text()) for run in runs}


def summary(results: dict[str, dict]) -> str:
    """A Markdown table: mean and standard error over seeds, and the paired difference to Slide:13L."""
    rows = []
    for task, split in product(TASKS.value, SPLITS):
        baseline = None
        for row, variant in VARIANTS:
            runs = (results[name_of(task, row, seed)][variant][split] for seed in SEEDS.value)
            values = pd.Series([run["bits_per_byte"] for run in runs])
            baseline = values if baseline is None else baseline
            label = row if variant == "trained" else f"{row}, {variant}"
            difference = values - baseline
            paired = "" if baseline is values else with_error(difference.mean(), difference.sem(), "+.4f")
            rows.append((f"{task}, {split}: {label}", with_error(values.mean(), values.sem(), ".4f"), paired))
    return Table("", ("documents, split: model", "bits per byte", "paired difference to slide_13l"), rows).to_markdown()


def plot(results: dict[str, dict]) -> None:
    """Left of each pair: training, as the difference within a pair of seeds. Right: by position in the document."""
    folder = Path(FOLDER.value)
    figure = Figure(figsize=(11, 3.6 * len(TASKS.value)), dpi=120, layout="constrained")
    axes = figure.subplots(len(TASKS.value), 2, squeeze=False)
    for (left, right), task in zip(axes, TASKS.value, strict=True):
        differences = []
        for seed in SEEDS.value:
            slide, recurrent = (
                read_metrics(folder / name_of(task, row, seed), "bits_per_byte")["train"] for row in ROWS
            )
            # A running mean over 9 logs, shorter at the ends.
            differences.append((recurrent - slide).rolling(9, center=True, min_periods=1).mean())
            left.plot(differences[-1], color="tab:blue", alpha=0.3, linewidth=1)
        left.plot(pd.concat(differences, axis=1).mean(axis=1), color="tab:blue", label="fixed:skip minus Slide:13L")
        left.axhline(0, color="black", linewidth=0.8)
        low, high = np.percentile(pd.concat([d.iloc[len(d) // 8 :] for d in differences]), [1, 99])
        left.set(
            xlabel="step",
            ylabel="bits per byte",
            title=f"{task}: training loss, same batches",
            ylim=(low * 1.3, high * 1.3),
        )
        left.legend()
        for (row, variant), style in zip(VARIANTS, ("-", "-", "--", ":"), strict=True):
            curves = np.array([results[name_of(task, row, s)][variant]["test"]["positions"] for s in SEEDS.value])
            label = row if variant == "trained" else variant
            right.plot(curves[0, :, 0] + 1, curves[:, :, 1].mean(axis=0), style, marker="o", markersize=3, label=label)
        right.set(xscale="log", xlabel="position in the document", ylabel="bits per byte", title=f"{task}: test split")
        right.legend()
    figure.savefig(folder / "study.png")


def main(_) -> None:
    if ONE.value:
        one_run(*ONE.value.split(","))
        return
    if status := run_all():
        sys.exit(status)
    results = read_results()
    write_json(Path(FOLDER.value) / "study.json", results)
    print(summary(results))
    plot(results)


if __name__ == "__main__":
    app.run(main)
