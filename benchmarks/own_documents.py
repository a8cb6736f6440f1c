r"""The recipe for own documents (gin/own_documents.gin) on three kinds of documents, beside gzip and xz.

    python benchmarks/own_documents.py documents --books=data/books     # books has folders by author
    python benchmarks/own_documents.py runs --steps=3000 --seeds=0,1,2  # the same command resumes
    python benchmarks/own_documents.py table

Books are by Austen, Melville, Milton and Shakespeare; source code is files of installed Python packages, documentation
man pages and texts in /usr/share/doc, of which every twentieth is for test and for validation. Settings were chosen on
validation, and test was read once.
"""

import csv
import gzip
import json
import random
import site
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from absl import app, flags

HELD_OUT = {
    "validation": ("austen_northangerabbey", "shakespeare_macbeth", "shakespeare_twelfth_night"),
    "test": ("austen_persuasion", "shakespeare_hamlet", "shakespeare_tempest", "milton_areopagitica"),
}
AUTHORS = ("austen", "milton", "mobydick", "shakespeare")
PACKAGES = (
    *("matplotlib", "flax", "optax", "orbax", "rich", "fontTools", "huggingface_hub", "aiohttp", "docutils"),
    *("hypothesis", "click", "jinja2", "urllib3", "networkx", "fsspec", "grain", "pip", "setuptools", "absl"),
    *("markdown", "treescope", "httpx", "anyio", "requests", "tensorboardX", "etils", "babel", "packaging"),
)
BYTES = 8_000_000
BOOKS = flags.DEFINE_string("books", "data/books", "Folder of AUTHOR/TITLE.txt.")
FOLDER = flags.DEFINE_string("folder", "runs/own_documents", "For documents, stores and runs.")
KINDS = flags.DEFINE_list("kinds", ["books", "code", "documentation"], "Kinds of documents.")
STEPS = flags.DEFINE_list("steps", ["3000"], "Numbers of steps.")
SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds.")


def books() -> Iterator[tuple[str, str, bytes]]:
    for author in AUTHORS:
        for file in sorted(Path(BOOKS.value, author).glob("*.txt")):
            name = f"{author}_{file.stem}"
            yield name, next((split for split, names in HELD_OUT.items() if name in names), "train"), file.read_bytes()


def code() -> Iterator[tuple[str, bytes]]:
    installed = Path(site.getsitepackages()[0])
    for package in PACKAGES:
        for file in sorted((installed / package).rglob("*.py")):
            yield str(file.relative_to(installed)), file.read_bytes()


def documentation() -> Iterator[tuple[str, bytes]]:
    share = Path("/usr/share")
    for section in "124578":
        for file in sorted(share.glob(f"man/man{section}/*.gz")):
            if file.is_file() and not file.name.startswith(("gcloud", "perl", "gsutil", "bq")):
                yield f"man_{file.stem}", gzip.decompress(file.read_bytes())
    for file in sorted(share.glob("doc/*/*")):
        if file.name.endswith((".txt", ".md", ".rst", ".txt.gz")) and file.is_file():
            content = file.read_bytes()
            yield "_".join(file.parts[4:]), gzip.decompress(content) if file.suffix == ".gz" else content


def dealt(documents: Iterator[tuple[str, bytes]]) -> Iterator[tuple[str, str, bytes]]:
    """Different documents of 4 to 400 kB of text in a random order, with their splits, until there are enough bytes."""
    order, seen, total = list(documents), set(), 0
    random.Random(0).shuffle(order)
    for name, content in order:
        if 4_000 <= len(content) <= 400_000 and content not in seen and is_text(content) and total < BYTES:
            split = {0: "test", 1: "validation"}.get(len(seen) % 20, "train")
            seen.add(content)
            total += len(content)
            yield name, split, content


def is_text(content: bytes) -> bool:
    try:
        return "\0" not in content.decode()
    except UnicodeDecodeError:
        return False


def make_documents() -> None:
    kinds = {"books": books, "code": lambda: dealt(code()), "documentation": lambda: dealt(documentation())}
    for kind in KINDS.value:
        for name, split, content in kinds[kind]():
            path = Path(FOLDER.value, kind, split, name.replace("/", "_") + ".txt")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        run("prepare", *settings(kind))


def make_runs() -> None:
    for seed in SEEDS.value:
        for steps in STEPS.value:
            for kind in KINDS.value:
                workdir = f"{FOLDER.value}/runs/{kind}-{steps}-{seed}"
                if not Path(workdir, "test.json").exists():
                    more = (f"TrainingConfig.num_steps = {steps}", f"TrainingConfig.seed = {seed}")
                    run("train", *settings(kind, *more), f"--workdir={workdir}")
                    run("evaluate", f"--checkpoint={workdir}", "--compare", f"--output={workdir}/test.json")


def settings(kind: str, *more: str) -> list[str]:
    folders = (f"FolderSourceConfig.folder = '{FOLDER.value}/{kind}'",)
    folders += (f"ReaderConfig.store = '{FOLDER.value}/stores/{kind}'",)
    return ["--gin_file=own_documents.gin", *(f"--gin_param={param}" for param in (*folders, *more))]


def run(command: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", f"meliad_like.{command}", *arguments], check=True)


def write_table() -> None:
    rows = csv.writer(sys.stdout, lineterminator="\n")
    rows.writerow(["documents", "steps", "seed", "bits per byte", "gzip -9", "xz -9"])
    for path in sorted(Path(FOLDER.value, "runs").glob("*/test.json")):
        result = json.loads(path.read_text())
        others = result["other_bits_per_byte"]
        figures = (result["figures"]["bits_per_byte"], others["gzip -9"], others["xz -9"])
        rows.writerow([*path.parent.name.split("-"), *(f"{figure:.4f}" for figure in figures)])


PARTS = {"documents": make_documents, "runs": make_runs, "table": write_table}

if __name__ == "__main__":
    app.run(lambda arguments: PARTS[arguments[1]]())
