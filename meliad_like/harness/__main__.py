"""Evaluates a trained model with tasks of EleutherAI's lm-evaluation-harness.

    meliad_like harness --checkpoint=runs/quickstart --tasks=lambada_openai,wikitext
    meliad_like harness --checkpoint=runs/quickstart --tasks=my_task.yaml --output=results.json
    meliad_like harness --checkpoint=runs/quickstart --tasks=niah_single_1 --metadata='{"max_seq_lengths": [4096]}'

It needs the extra `harness`, and the network for the documents of the harness's own tasks.
"""

import json
from pathlib import Path
from typing import Any

from meliad_like.command_line import CONFIG_OF_CHECKPOINT, Command
from meliad_like.errors import UserError
from meliad_like.remote import write_whole
from meliad_like.resumable import parse_json

COMMAND = Command(__doc__, no_effect={"gin_file": CONFIG_OF_CHECKPOINT})
CHECKPOINT = COMMAND.shared(
    "checkpoint", "Checkpoint folder, the --workdir of a training, or a folder of transformers."
)
STEP = COMMAND.shared("step")
DTYPE = COMMAND.shared("dtype")
TASKS = COMMAND.list("tasks", None, "Names of tasks, or YAML files of tasks, with commas.", required=True)
INCLUDE_PATH = COMMAND.multi_string("include_path", [], "A folder with further tasks. Repeatable.")
NUM_FEWSHOT = COMMAND.integer("num_fewshot", None, "Examples in each context. Default: the task's.", lower_bound=0)
METADATA = COMMAND.string(
    "metadata", "{}", "JSON object: settings of tasks that make their own documents, such as RULER's."
)
LIMIT = COMMAND.integer("limit", None, "Only this number of first items of each task.", lower_bound=1)
BATCH_SIZE = COMMAND.shared("batch_size")
FIRST_TOKENS = COMMAND.bool(
    "first_tokens",
    False,
    "Read an end of document before each document and in place of an empty context, as the harness's own adapters do. "
    "For models trained so.",
)
LOG_SAMPLES = COMMAND.bool("log_samples", False, "Write the items with the model's answers to --output, too.")
OUTPUT = COMMAND.output("output", "JSON file for the results.")
HEAT_MAP = COMMAND.output("heat_map", "PNG file: scores of needle tasks by length and depth (RULER's).", "picture")


def main() -> None:
    if OUTPUT.value is None and LOG_SAMPLES.value:
        raise UserError("--log_samples has no effect without --output: name a file")
    metadata = parse_json(METADATA.value, f"--metadata={METADATA.value}")
    if not isinstance(metadata, dict):
        raise UserError(f"--metadata={METADATA.value} is not a JSON object")
    lm_eval = import_harness()
    from lm_eval.tasks import TaskManager  # type: ignore[import-not-found]
    from lm_eval.utils import handle_non_serializable, make_table  # type: ignore[import-not-found]

    from meliad_like.harness.model import HarnessModel, tokenizer_for_tasks

    files = [task for task in TASKS.value if Path(task).suffix in (".yaml", ".yml")]
    names = [task for task in TASKS.value if task not in files]
    # The harness needs seconds to find its own tasks.
    tasks = TaskManager(
        include_path=INCLUDE_PATH.value,
        include_defaults=bool(names),
        metadata={"tokenizer": CHECKPOINT.value} | metadata,
    )
    if missing := [file for file in files if not Path(file).exists()]:
        raise UserError(f"there is no task file {missing[0]}")
    if unknown := [name for name in names if not tasks.match_tasks([name])]:
        raise UserError(f"there is no task {unknown[0]!r}; lm_eval ls tasks shows the harness's own")
    model = HarnessModel(
        CHECKPOINT.value, STEP.value, BATCH_SIZE.value, FIRST_TOKENS.value, COMMAND.gin_param.value, DTYPE.value
    )
    with tokenizer_for_tasks(model, CHECKPOINT.value):
        results = lm_eval.simple_evaluate(
            model=model,
            tasks=[*files, *tasks.match_tasks(names)],
            task_manager=tasks,
            num_fewshot=NUM_FEWSHOT.value,
            limit=LIMIT.value,
            log_samples=LOG_SAMPLES.value or HEAT_MAP.value is not None,
        )
    assert results is not None
    print(make_table(results))
    maps = {}
    if HEAT_MAP.value is not None:
        # It loads matplotlib.
        from meliad_like.harness.needles import draw_heat_map, needle_maps

        maps = needle_maps(results["samples"])
    if maps:
        results["needles"] = {
            # NaN, where no document has that depth and length, is null in JSON.
            task: cells.astype(object).where(cells.notna(), None).reset_index().to_dict("list")
            for task, cells in maps.items()
        }
    if not LOG_SAMPLES.value:
        results.pop("samples", None)
    # Before anything is drawn, so that the results are there whatever happens.
    if OUTPUT.value is not None:
        text = json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False)
        write_whole(OUTPUT.value, text + "\n")
        print(f"wrote {OUTPUT.value}")
    if HEAT_MAP.value is not None:
        draw_heat_map(maps, Path(HEAT_MAP.value))


def import_harness() -> Any:
    """The package of the harness. Raises a UserError if it is not installed."""
    try:
        import lm_eval  # type: ignore[import-not-found]  # an extra
    except ModuleNotFoundError as error:
        raise UserError(f"{error}: install the harness with pip install 'meliad_like[harness]'") from None
    return lm_eval


if __name__ == "__main__":
    COMMAND.run(main)
