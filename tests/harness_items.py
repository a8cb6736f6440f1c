"""Multiple-choice questions about the standard library: which sentence documents this function?

python tests/harness_items.py FOLDER writes them with a task of the lm-evaluation-harness, `library_choices.yaml`, and
others about the same texts.
"""

import importlib
import inspect
import json
import random
import sys
from pathlib import Path
from typing import NamedTuple

MODULES = (
    "argparse", "base64", "bisect", "calendar", "collections", "contextlib", "copy", "csv", "datetime", "difflib",
    "functools", "glob", "heapq", "inspect", "itertools", "json", "logging", "math", "operator", "os", "os.path",
    "pathlib", "pickle", "pprint", "random", "re", "shlex", "shutil", "statistics", "string", "subprocess", "tempfile",
    "textwrap", "threading", "tokenize", "traceback", "urllib.parse", "warnings", "zipfile",
)  # fmt: skip
NUM_CHOICES = 4
TASKS = {
    "library_choices": """
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
""",
    "library_rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{context}}{{choices[answer]}}"
metric_list:
  - {metric: bits_per_byte}
""",
    "library_writing": """
output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["e"], max_gen_toks: 12}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
""",
}


class Item(NamedTuple):
    """A question, its choices, and the index of the right one."""

    context: str
    choices: list[str]
    answer: int


def items(number: int) -> list[Item]:
    """The questions, the same ones for a version of Python. All of a module begin with its own documentation."""
    chance, found = random.Random(0), []
    for name in MODULES:
        module = importlib.import_module(name)
        documented = {
            function: (inspect.getdoc(value) or "").split("\n")[0].strip()
            for function, value in sorted(vars(module).items())
            if inspect.isroutine(value) and function[0] != "_"
        }
        sentences = {function: sentence for function, sentence in documented.items() if sentence}
        about = " ".join((inspect.getdoc(module) or "").split())[:100]
        for function, sentence in sentences.items():
            others = sorted(set(sentences.values()) - {sentence})
            if len(others) >= NUM_CHOICES - 1:
                choices = chance.sample(others, NUM_CHOICES - 1)
                answer = chance.randrange(NUM_CHOICES)
                choices.insert(answer, sentence)
                context = f"{name}: {about}\n\n{name}.{function}:"
                found.append(Item(context, [f" {choice}" for choice in choices], answer))
    chance.shuffle(found)
    assert len(found) >= number
    return found[:number]


def write_tasks(folder: Path, number: int) -> dict[str, Path]:
    """Writes the questions and the YAML files of tasks about them: the files by name."""
    lines = [json.dumps(item._asdict()) for item in items(number)]
    (folder / "items.jsonl").write_text("\n".join(lines) + "\n")
    for name, settings in TASKS.items():
        data = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: '{folder / 'items.jsonl'}'}}}}"
        (folder / f"{name}.yaml").write_text(f"{data}\ntest_split: test{settings}")
    return {name: folder / f"{name}.yaml" for name in TASKS}


if __name__ == "__main__":
    write_tasks(Path(sys.argv[1]).absolute(), 200)
