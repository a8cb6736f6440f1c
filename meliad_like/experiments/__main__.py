"""Makes a table of the Block-Recurrent paper: `python -m meliad_like.experiments table1 --scale=tiny`.

The same command goes on after a stop: what is finished is not done again, and what is not goes on from its last
checkpoint. With --row (and --seeds) it is one of several jobs, on this machine or on others that share the folder or
whose folders are copied together; --report then makes the table of what is there.
"""

import os
import sys
from pathlib import Path

from absl import flags

from meliad_like import command_line
from meliad_like.errors import UserError

TABLES = ("table1", "table3", "table4", "table5")

SCALE = flags.DEFINE_enum("scale", "tiny", ["tiny", "small", "paper"], "How large the models and the runs are.")
TASK = flags.DEFINE_string("task", "task/standard_library.gin", "Gin file of the documents and their vocabulary.")
STORE = flags.DEFINE_string("store", None, "Token store, made if it is not there. Default: the one of the task.")
FOLDER = flags.DEFINE_string("folder", None, "Of runs and results. Default: runs/experiments/TABLE_SCALE.")
SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Of parameters and of the order of documents: a run each.")
ROW = flags.DEFINE_multi_string("row", [], "Only this row, by the name of its gin file. Repeatable. Default: all.")
JOBS = flags.DEFINE_integer("jobs", 0, "Runs side by side; 0: at tiny as many as there are cores, otherwise one.")
SPLIT = flags.DEFINE_enum("split", "test", ["validation", "test"], "Evaluated on all documents of it.")
REPEATS = flags.DEFINE_integer("repeats", 15, "Rounds of timed steps.", lower_bound=1)
REPORT = flags.DEFINE_bool("report", False, "Only make the table of what is there.")
STEP_TIME = flags.DEFINE_bool("step_time", False, "Only time the rows' steps, in turn; needs no documents.")
WORKER = flags.DEFINE_string("worker", None, "Used by the program itself: step_time, or the one run ROW,SEED.")


def main(subject: str) -> int:
    if not SEEDS.value or not all(seed.isdecimal() for seed in SEEDS.value):
        raise UserError(f"--seeds={','.join(SEEDS.value)} must be numbers, such as 0,1,2")
    # Importing jax takes seconds: a mistyped flag is reported before.
    from meliad_like.experiments.experiment import Experiment
    from meliad_like.experiments.scales import SCALES
    from meliad_like.experiments.tables import TABLES

    store = [f"ReaderConfig.store = {STORE.value!r}"] if STORE.value else []
    experiment = Experiment(
        table=TABLES[subject],
        scale_name=SCALE.value,
        gin_files=(TASK.value, *command_line.GIN_FILE.value),
        gin_params=(*store, *command_line.GIN_PARAM.value),
        folder=Path(FOLDER.value or f"runs/experiments/{subject}_{SCALE.value}"),
        seeds=tuple(map(int, SEEDS.value)),
        chosen=tuple(ROW.value),
        split=SPLIT.value,
        repeats=REPEATS.value,
        command=(sys.executable, "-m", "meliad_like.experiments", *sys.argv[1:]),
    )
    if WORKER.value:
        return experiment.work(WORKER.value)
    experiment.folder.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    status = 0
    side_by_side = JOBS.value or ((os.cpu_count() or 1) if SCALES[SCALE.value].side_by_side else 1)
    if not REPORT.value and not STEP_TIME.value:
        status = experiment.train(side_by_side, failed)
    # A job of some rows leaves the timing to the command for all of them.
    if not status and (STEP_TIME.value or not (REPORT.value or ROW.value or experiment.timed)):
        status = experiment.time_steps(side_by_side, failed)
    if status:
        return status
    print(experiment.report())
    print(f"wrote {experiment.folder / subject}.md, .csv and .png")
    if failed:
        raise UserError(f"{len(failed)} failed, the rest is done: {', '.join(failed)}")
    return 0


if __name__ == "__main__":
    command_line.run(main, subjects=TABLES)
