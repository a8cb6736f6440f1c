"""The trial of a run before anything is paid for: made small, trained, killed, resumed, evaluated, and used.

The documents are the first ones of the task, or Python's standard library if the task's are not there. At the end it
shows what the full run needs.
"""

import contextlib
import itertools
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from meliad_like.config import RunConfig, differences, to_gin, with_changes
from meliad_like.data.preparation import prepare
from meliad_like.data.token_store import TokenStore
from meliad_like.errors import StoreError, UserError
from meliad_like.evaluation.perplexity import make_evaluator
from meliad_like.library import LanguageModel
from meliad_like.planning.description import describe
from meliad_like.planning.shrinking import shrink
from meliad_like.remote import any_path
from meliad_like.run.opening import open_checkpoint
from meliad_like.run.setup import vocabulary_size
from meliad_like.run.workflow import train
from meliad_like.sources.base import EmptyDocumentError, NotUTF8Error, SourceConfig, open_source
from meliad_like.sources.files import StandardLibrarySource, TextSource
from meliad_like.tables import Table
from meliad_like.vocabularies.base import saved_vocabulary_config

NUM_DOCUMENTS = {"train": 12, "validation": 2, "test": 2}
MOST_CHARACTERS = 20_000
"""The number of characters that are kept of each document."""
MOST_READ = 500
"""The number of documents among which documents of each split are looked for."""
TOKENS_TO_EVALUATE, TOKENS_TO_READ, TOKENS_TO_WRITE = 4000, 64, 32


def smoke(run: RunConfig, workdir: str | None, gin_flags: str) -> None:
    """Tries a run, made small. Raises a UserError if something doesn't work, or the folder exists.

    Args:
      workdir: a new folder that keeps everything; None: one that is deleted at the end.
      gin_flags: the flags of the run, for the commands that are shown.
    """
    if workdir is not None and Path(workdir).expanduser().exists():
        raise UserError(f"--workdir={workdir} exists: name a new folder for --smoke")
    # Before a device is used: XLA optimises less, because compiling takes longer than computing.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
    with contextlib.ExitStack() as stack:
        temporary = workdir or stack.enter_context(tempfile.TemporaryDirectory(prefix="meliad_like_smoke_"))
        folder = Path(temporary).expanduser().absolute()
        folder.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        try_out(make_small(run, folder), folder)
        say(f"everything works at this size: {time.perf_counter() - began:.0f} s")
        tell_needs(run, gin_flags)


def say(text: str) -> None:
    """Prints a line that stands out between those of a training."""
    print(f"== {text}", flush=True)


def has_stores(run: RunConfig) -> bool:
    """Whether the run names its token stores, and they are there."""
    try:
        return bool(run.data.store and run.data.open_stores())
    except StoreError:
        return False


def make_small(run: RunConfig, folder: Path) -> RunConfig:
    """A small run in the folder, with a token store; prints in what it differs from the full run."""
    if has_stores(run):
        say(f"documents: the token store {run.data.store}")
        small = shrink(run, keep_vocabulary=True)
    else:
        file = getattr(run.vocabulary, "model_file", "")
        small = shrink(run, keep_vocabulary=bool(file) and any_path(file).exists())
        # The stores of a mixture have the same vocabulary, but no document in common.
        numbers = range(len(run.data.shares))
        stores, documents = ([folder / f"{name}_{i}" for i in numbers] for name in ("store", "documents"))
        try:
            copy_documents(run.source, *documents)
        except UserError as error:
            say(f"the task's documents are not there ({error})")
            copy_documents(StandardLibrarySource(), *documents)
        sources = [TextSource(folder=str(each)) for each in documents]
        small = with_changes(small, {"source": sources[0], "data": small.data.with_stores([*map(str, stores)])})
        for i in numbers:
            vocabulary = saved_vocabulary_config(stores[0]) if i else small.vocabulary
            prepare(sources[i], vocabulary, str(stores[i]), 1, for_training=True)
    changed = [(name, str(full), str(value)) for name, (full, value) in differences(run, small).items()]
    Console().print(Table("made smaller", ("", "full", "here"), changed).to_rich())
    return small


def copy_documents(config: SourceConfig, *folders: Path) -> None:
    """Writes the beginnings of a source's first documents as text files into the folders, each with a folder for each
    split and with documents of its own. A split without documents among the first ones gets copies of others.

    Raises a UserError if the source can't be opened or has no documents.
    """
    texts: dict[str, list[str]] = {split: [] for split in NUM_DOCUMENTS}
    for reference in itertools.islice(open_source(config).references(), MOST_READ):
        if all(len(texts[split]) >= number * len(folders) for split, number in NUM_DOCUMENTS.items()):
            break
        with contextlib.suppress(EmptyDocumentError, NotUTF8Error):
            document = reference()
            texts[document.split].append(document.text[:MOST_CHARACTERS])
    all_texts = [text for of_split in texts.values() for text in of_split]
    for (place, folder), (split, number) in itertools.product(enumerate(folders), NUM_DOCUMENTS.items()):
        (folder / split).mkdir(parents=True)
        for i, text in enumerate((texts[split] or all_texts)[place :: len(folders)][:number]):
            (folder / split / f"{i}.txt").write_text(text, encoding="utf-8", newline="")


def try_out(run: RunConfig, folder: Path) -> None:
    """Trains, is killed, resumes, evaluates and writes; prints each. Raises a UserError where that fails."""
    gin_file, workdir = folder / "smoke.gin", folder / "run"
    gin_file.write_text(to_gin(run))
    began = time.perf_counter()
    step = train_until_killed(gin_file, workdir)
    say(f"killed by SIGKILL after {time.perf_counter() - began:.0f} s, with step {step} saved; resuming")
    train(run, workdir)
    opened = open_checkpoint(workdir, mesh="config")
    store = TokenStore(run.data.store)
    split = next(split for split in ("test", "validation", "train") if store.totals(split).documents)
    documents = store.split(split).beginnings(opened.vocabulary, TOKENS_TO_EVALUATE)
    evaluation = make_evaluator(run, opened.model, store, split, opened.mesh, documents=documents)(opened.params)
    if not math.isfinite(evaluation.bits_per_token):
        raise UserError(f"the trained model's loss on the {split} documents is not finite")
    say(f"evaluated: {evaluation.bits_per_token:.3f} bits per token on {evaluation.num_tokens:,} tokens of {split}")
    if reason := run.model.traits.needs_segments:
        say(f"it writes no text, because with {reason} its memory depends on where segments end")
        return
    prompt = documents.tokens(0, 0, min(TOKENS_TO_READ, int(documents.lengths[0]) - 1))
    say(f"written: {str(LanguageModel(opened).generate(prompt, TOKENS_TO_WRITE))!r}")


def train_until_killed(gin_file: Path, workdir: Path) -> int:
    """Trains in a process of its own, which is killed after its first checkpoint; returns the newest step saved.

    Nothing in this process may have used a device before, because some belong to one process alone.
    """
    log, checkpoints = gin_file.with_suffix(".log"), workdir / "checkpoints"

    def saved() -> list[int]:
        return [int(path.name) for path in checkpoints.glob("*") if path.name.isdecimal()]

    command = [sys.executable, "-m", "meliad_like.train", f"--gin_file={gin_file}", f"--workdir={workdir}"]
    with log.open("w") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
        try:
            while process.poll() is None and not saved():
                time.sleep(0.01)
        finally:
            process.kill()
    if process.returncode != -signal.SIGKILL:
        *_, last = [line for line in log.read_text().splitlines() if line] or ["it said nothing"]
        raise UserError(f"the training ended with status {process.returncode}: {last.removeprefix('error: ')}")
    return max(saved())


def tell_needs(run: RunConfig, gin_flags: str) -> None:
    """Prints what the full run needs, and the commands that come before it."""
    try:
        description = describe(run, vocabulary_size(run))
    except UserError as error:
        say(f"what the full run needs: meliad_like describe{gin_flags} --vocabulary_size=NUMBER ({error})")
    else:
        Console().print(description.table().to_rich())
    print("before the full run:")
    if not has_stores(run):
        print(f"  meliad_like prepare{gin_flags}")
    print(f"  meliad_like plan{gin_flags} --topology=v4:2x2x4")
