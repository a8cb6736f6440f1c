"""Makes a table of a paper at a scale.

    meliad_like experiments table1 --scale=tiny

table1, table3, table4, table5   of Block-Recurrent Transformers
shortformer                      of Shortformer: stages, infused positions and caches
melodi                           of MELODI: compressed memories and a dense one
mixers                           linear recurrences and hybrid stacks, at the sizes of table1
optimizers                       optimizers and schedules, with the model of the quickstart
memory_map                       maps of what memories hold, with documents made for them
recurrence                       of Adding Recurrence to Pretrained Transformers; --load_dir=DIR is the pretrained model
ancient_history                  of Ancient History Language Models; --load_dir=DIR is the pretrained model

Rows are made one after the other. The same command resumes: finished runs are skipped, the others continue from their
last checkpoint. With --row (and --seeds) it is one of several jobs, on this machine or on others that share the folder
or whose folders are copied together; --report then makes the table of the results that exist.
"""

import sys
from pathlib import Path

from meliad_like.command_line import Command
from meliad_like.errors import UserError

HISTORY = "ancient_history"
PAPERS = ("table1", "table3", "table4", "table5", "shortformer", "melodi", "recurrence")
TRAININGS = (*PAPERS, "memory_map", "mixers", "optimizers")
PRETRAINED = ("recurrence", HISTORY)

USED_BY = {
    **dict.fromkeys(("seeds", "repeats", "step_time"), TRAININGS),
    **dict.fromkeys(("scored_tokens", "document_tokens"), (HISTORY,)),
    "load_dir": PRETRAINED,
}
"""The flags that not all tables have."""

COMMAND = Command(__doc__, subjects=(*TRAININGS, HISTORY), used_by=USED_BY)

SCALE = COMMAND.enum("scale", "tiny", ["tiny", "small", "paper"], "How large the models and the runs are.")
TASK = COMMAND.string("task", None, "Gin file of the documents and their vocabulary. Default: as the table says.")
STORE = COMMAND.string("store", None, "Token store, made if it doesn't exist. Default: the one of the task.")
FOLDER = COMMAND.output("folder", "Folder of runs and results. Default: runs/experiments/TABLE_SCALE.", "folder")
SEEDS = COMMAND.list("seeds", ["0", "1", "2"], "Seeds of parameters and of the order of documents; one run for each.")
ROW = COMMAND.multi_string("row", [], "Name of a row to make. Repeatable. Default: all rows of the scale.")
SPLIT = COMMAND.enum("split", "test", ["validation", "test"], "The split that is evaluated.")
MAX_TOKENS = COMMAND.integer(
    "max_tokens", None, "Tokens to evaluate, of the beginnings of documents. Default: as the scale says.", lower_bound=1
)
LOAD_DIR = COMMAND.string("load_dir", None, "Checkpoint folder of the pretrained model (from convert).")
SCORED_TOKENS = COMMAND.integer(
    "scored_tokens", None, "Tokens of documents to score. Default: as the scale says.", lower_bound=1
)
DOCUMENT_TOKENS = COMMAND.shared(
    "document_tokens", "Tokens to read of each document, from its beginning. Default: as the scale says.", lower_bound=2
)
REPEATS = COMMAND.integer("repeats", 15, "Rounds of timed steps.", lower_bound=1)
REPORT = COMMAND.bool("report", False, "Only make the table of the results that exist.")
STEP_TIME = COMMAND.bool("step_time", False, "Only time the rows' steps; needs no documents.")


def main(subject: str) -> int:
    if not SEEDS.value or not all(seed.isdecimal() for seed in SEEDS.value):
        raise UserError(f"--seeds={','.join(SEEDS.value)} must be numbers, such as 0,1,2")
    # Importing jax takes seconds: a mistyped flag is reported before.
    from meliad_like.experiments.experiment import Experiment
    from meliad_like.experiments.pretrained import HOW_TO_GET_ONE
    from meliad_like.experiments.tables import SUBJECTS, Table

    if subject in PRETRAINED and not (LOAD_DIR.value or REPORT.value):
        raise UserError(f"{subject} begins with a pretrained model: give --load_dir=DIR; {HOW_TO_GET_ONE}")
    store = [f"ReaderConfig.store = {STORE.value!r}"] if STORE.value else []
    task = TASK.value or SUBJECTS.get(subject, Table).task
    settings = {
        "scale_name": SCALE.value,
        "gin_files": (task, *COMMAND.gin_file.value),
        "gin_params": (*store, *COMMAND.gin_param.value),
        "folder": Path(FOLDER.value or f"runs/experiments/{subject}_{SCALE.value}"),
        "load_dir": LOAD_DIR.value or "",
        "row_names": tuple(ROW.value),
        "split": SPLIT.value,
        "max_tokens": MAX_TOKENS.value,
    }
    if subject == HISTORY:
        from meliad_like.experiments.ancient_history import HistoryExperiment

        tokens = {"scored_tokens": SCORED_TOKENS.value, "document_tokens": DOCUMENT_TOKENS.value}
        experiment = HistoryExperiment(**settings, **tokens)
        status, failed = (0 if REPORT.value else experiment.make()), []
    else:
        seeds = tuple(map(int, SEEDS.value))
        experiment = Experiment(**settings, table=SUBJECTS[subject], seeds=seeds, repeats=REPEATS.value)
        status, failed = (0, []) if REPORT.value else experiment.make(STEP_TIME.value)
    if status:
        return status
    text = experiment.report()
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.markdown import Markdown

        narrow = isinstance(experiment, Experiment)
        Console().print(experiment.results().for_terminal().to_rich() if narrow else Markdown(text))
    else:
        print(text)
    print(f"wrote {experiment.folder / subject}.md, .csv and .png")
    if failed:
        raise UserError(f"{len(failed)} failed, the others are finished: {', '.join(failed)}")
    return 0


if __name__ == "__main__":
    COMMAND.run(main)
