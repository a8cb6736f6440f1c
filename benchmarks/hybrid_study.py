r"""A planned comparison at equal time: a hybrid stack (mixer/rg_lru.gin) against a layer more and recurrent states.

    python benchmarks/hybrid_study.py documents --books=data/books
    python benchmarks/hybrid_study.py runs --jobs=2       # the same command resumes
    python benchmarks/hybrid_study.py intervals

The hybrid was chosen on validation (`experiments mixers --split=validation`, seed 0), and this plan was written before
any of these models read the documents of the comparison, which are set aside as the test split: of code, the first
25,000 bytes of 16 installed packages' `.py` files; of books, the first 50,000 bytes of every seventh training book from
the fourth on. The training code is that of the standard library. The hybrid wins if for both kinds of documents and
both baselines the 95 % interval of its difference, over documents and seeds, is below 0.
"""

import functools
import itertools
import site
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from absl import app, flags

from meliad_like import config
from meliad_like.data.preparation import prepare
from meliad_like.sources.base import open_source

STEPS = {"slide_13l": 4400, "rg_lru": 4339, "fixed_skip": 4067}
"""As many as fit into the time of Slide:13L's, by `experiments mixers --step_time` on two cores: 1, 1.014 and 1.082."""
KINDS = "code", "books"
PACKAGES = (
    *("absl", "attr", "charset_normalizer", "click", "einops", "etils", "filelock", "flax", "fsspec", "jinja2"),
    *("markdown_it", "optax", "pygments", "requests", "rich", "yaml"),
)
BOOKS = flags.DEFINE_string("books", "data/books", "Folder with train/ and validation/.")
FOLDER = flags.DEFINE_string("folder", "runs/hybrid_study", "For documents, stores, runs.")
JOBS = flags.DEFINE_integer("jobs", 2, "Runs at the same time.")
SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Seeds.")


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def make_documents() -> None:
    code, books = Path(FOLDER.value, "code"), Path(FOLDER.value, "books")
    for reference in open_source(config.parse(["task/standard_library.gin"], []).source).references():
        if (document := reference()).split != "test":
            write(code / document.split / f"{document.name}.txt", document.text.encode())
    installed = Path(site.getsitepackages()[0])
    for name in PACKAGES:
        files = sorted((installed / name).rglob("*.py"))
        write(code / "test" / f"{name}.txt", b"".join(file.read_bytes() for file in files)[:25_000])
    for number, file in enumerate(sorted(Path(BOOKS.value, "train").rglob("*.txt"))):
        is_test = number % 7 == 3
        content = file.read_bytes()[: 50_000 if is_test else None]
        write(books / ("test" if is_test else "train") / file.name, content)
    for file in Path(BOOKS.value, "validation").rglob("*.txt"):
        write(books / "validation" / file.name, file.read_bytes())
    for kind in KINDS:
        run = config.parse(["task/books.gin"], [f"FolderSourceConfig.folder = '{FOLDER.value}/{kind}'"])
        prepare(run.source, run.vocabulary, f"{FOLDER.value}/stores/{kind}")


def make_runs() -> None:
    for seed, kind in itertools.product(SEEDS.value, KINDS):
        runs = [command(kind, row, steps, seed) for row, steps in STEPS.items()]
        with ThreadPoolExecutor(JOBS.value) as pool:
            list(pool.map(functools.partial(subprocess.run, check=True), runs))


def command(kind: str, row: str, steps: int, seed: str) -> list[str]:
    table = [sys.executable, "-m", "meliad_like.experiments", "mixers", "--task=task/books.gin", f"--row={row}"]
    folders = [f"--store={FOLDER.value}/stores/{kind}", f"--folder={FOLDER.value}/runs/{kind}"]
    # The stores alone, so that they can be copied to another machine.
    params = ("FolderSourceConfig.folder = ''", f"TrainingConfig.num_steps = {steps}", "TrainingConfig.log_every = 100")
    return [*table, *folders, f"--seeds={seed}", *(f"--gin_param={param}" for param in params)]


def print_intervals() -> None:
    script = Path(__file__).with_name("paired_intervals.py")
    for kind, row in itertools.product(KINDS, ("slide_13l", "fixed_skip")):
        model, baseline = (f"{FOLDER.value}/runs/{kind}/{name}-{{seed}}/test.json" for name in ("rg_lru", row))
        print(f"{kind}, RG-LRU against {row}:", flush=True)
        subprocess.run([sys.executable, script, f"--model={model}", f"--baseline={baseline}"], check=True)


PARTS = {"documents": make_documents, "runs": make_runs, "intervals": print_intervals}

if __name__ == "__main__":
    app.run(lambda arguments: PARTS[arguments[1]]())
