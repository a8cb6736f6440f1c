"""Documents to train a model for needle tasks, made as the lm-evaluation-harness makes RULER's.

    python benchmarks/needle_documents.py --output=data/needles

Each document has needles in a repeated sentence, and a question about each of them with its answer. Short documents are
more frequent, because they are learned first. They are not the harness's own items: their words and numbers are drawn
by another seed. It needs the extra `harness`.
"""

import json
import random
import re
import sys
from pathlib import Path

from absl import app, flags

try:
    from lm_eval.tasks.ruler.niah_utils import TEMPLATE  # type: ignore[import-not-found]  # an extra
    from lm_eval.tasks.ruler.prepare_niah import generate_input_output, get_haystack  # type: ignore[import-not-found]
except ModuleNotFoundError as error:
    sys.exit(f"error: {error}: install the harness with pip install 'meliad_like[harness]'")

OUTPUT = flags.DEFINE_string("output", "data/needles", "Folder for train/ and validation/.")
DOCUMENTS = flags.DEFINE_integer("documents", 30_000, "The number of documents for training.")
LINES = flags.DEFINE_integer("lines", 12, "The largest number of sentences between the needles.")
SEED = flags.DEFINE_integer("seed", 1, "Seed; the harness has 0.")
NEEDLES = flags.DEFINE_integer("needles", 1, "The largest number of needles in a document.")

QUESTION = "What is the special magic number for {} mentioned in the provided text?"
ANSWER = " The special magic number for {} mentioned in the provided text is {}."


def document() -> str:
    needles = random.randint(1, NEEDLES.value)
    text, _, asked = generate_input_output(
        max(needles, round(LINES.value ** random.random())),
        get_haystack("repeat"),
        type_haystack="repeat",
        num_needle_k=needles,
        type_needle_k="words",
        num_needle_v=1,
        type_needle_v="numbers",
        template=TEMPLATE,
        random_seed=random.getrandbits(32),
    )
    numbers = dict(re.findall(r"numbers for (.+?) is: (\d+)\.", text))
    others = random.sample(sorted(numbers.keys() - {asked}), len(numbers) - 1)
    questions = (QUESTION.format(key) + ANSWER.format(key, numbers[key]) for key in others)
    return "\n".join((text + ANSWER.format(asked, numbers[asked]), *questions))


def main(_) -> None:
    random.seed(SEED.value)
    for split, number in (("train", DOCUMENTS.value), ("validation", 100)):
        folder = Path(OUTPUT.value, split)
        folder.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps({"text": document()}) for _ in range(number))
        (folder / "needles.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    app.run(main)
