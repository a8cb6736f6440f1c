"""Documents to train a model for needle tasks, made as the lm-evaluation-harness makes RULER's.

    python benchmarks/needle_documents.py --output=data/needles

Each document has one to four needles in a repeated sentence, the question about one of them, and its answer. They are
not the harness's own items: their words and numbers are drawn by another seed. It needs the extra `harness`.
"""

import json
import random
from pathlib import Path

from absl import app, flags
from lm_eval.tasks.ruler.niah_utils import TEMPLATE  # type: ignore[import-not-found]  # an extra
from lm_eval.tasks.ruler.prepare_niah import generate_input_output, get_haystack  # type: ignore[import-not-found]

OUTPUT = flags.DEFINE_string("output", "data/needles", "Folder for train/ and validation/.")
DOCUMENTS = flags.DEFINE_integer("documents", 20_000, "The number of documents for training.")
LINES = flags.DEFINE_integer("lines", 12, "The largest number of sentences between the needles.")
SEED = flags.DEFINE_integer("seed", 1, "Seed; the harness has 0.")
NEEDLES = 4
"""The largest number of needles in a document."""


def document() -> str:
    needles = random.randint(1, NEEDLES)
    text, (answer,), query = generate_input_output(
        random.randint(needles, LINES.value),
        get_haystack("repeat"),
        type_haystack="repeat",
        num_needle_k=needles,
        type_needle_k="words",
        num_needle_v=1,
        type_needle_v="numbers",
        template=TEMPLATE,
        random_seed=random.getrandbits(32),
    )
    return f"{text} The special magic number for {query} mentioned in the provided text is {answer}."


def main(_) -> None:
    random.seed(SEED.value)
    for split, number in (("train", DOCUMENTS.value), ("validation", 100)):
        folder = Path(OUTPUT.value, split)
        folder.mkdir(parents=True, exist_ok=True)
        lines = (json.dumps({"text": document()}) for _ in range(number))
        (folder / "needles.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    app.run(main)
