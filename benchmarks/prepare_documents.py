"""Time and peak memory of `prepare`, of opening the store, and of the first batch, by the number of documents.

python benchmarks/prepare_documents.py                          # 1,000, 100,000 and 1,000,000 small documents, bytes
python benchmarks/prepare_documents.py --megabytes=500          # one large document
python benchmarks/prepare_documents.py --files=10000 --added=100  # text files of 20 kB, then some more
python benchmarks/prepare_documents.py --files=10000 --bucket     # the same, or --megabytes, from a simulated bucket
python benchmarks/prepare_documents.py --tokenizer=FOLDER       # with a byte-level BPE

The documents are pieces of Python's standard library, 300 characters long in the mean, in one file of JSON lines. The
bucket's server is a process of its own on this machine, and competes with `prepare` for its cores.
"""

import contextlib
import json
import pathlib
import re
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time

import numpy as np
from absl import app, flags

from meliad_like.data.preparation import prepare
from meliad_like.data.readers import LanesReader, LanesReaderConfig
from meliad_like.data.token_store import TokenStore
from meliad_like.sources.files import TextSource
from meliad_like.sources.records import JsonLinesSource
from meliad_like.vocabularies.base import BytesVocabularyConfig
from meliad_like.vocabularies.tokenizers import TokenizersVocabularyConfig

DOCUMENTS = flags.DEFINE_multi_integer("documents", [10**3, 10**5, 10**6], "Numbers of small documents.")
MEGABYTES = flags.DEFINE_integer("megabytes", 0, "The size of one document, instead of many small ones.")
FILES = flags.DEFINE_integer("files", 0, "The number of text files of 20 kB, instead of small documents.")
ADDED = flags.DEFINE_integer("added", 0, "The number of files that are added to these, in a second `prepare`.")
BUCKET = flags.DEFINE_bool("bucket", False, "Whether documents are in a simulated bucket.")
TOKENIZER = flags.DEFINE_string("tokenizer", "", "File or folder of a byte-level BPE; by default tokens are bytes.")
WORKERS = flags.DEFINE_integer("workers", 2, "Processes that tokenise; 1: the process that writes does.")
STEP = flags.DEFINE_enum("step", None, ["prepare", "read"], "What to measure in the folder of --place alone.")
PLACE = flags.DEFINE_string("place", None, "Folder with the store.")
DOCUMENTS_IN = flags.DEFINE_string("documents_in", None, "Folder of the documents.")


def library_text() -> str:
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    return "".join(path.read_text("utf-8", "ignore") for path in sorted(library.glob("*.py")))


def write_files(folder: pathlib.Path, numbers: range) -> None:
    text = library_text()
    for i in numbers:
        begin = i * 977 % (len(text) - 20000)
        (folder / f"{i}.txt").write_text(text[begin : begin + 20000])


def write_documents(folder: pathlib.Path, number: int) -> None:
    """Writes a number of small documents, or with 0 one large one, or files."""
    text = library_text()
    folder.mkdir()
    if FILES.value:
        write_files(folder, range(FILES.value))
    elif not number:
        repeated = text.encode() * (MEGABYTES.value * 10**6 // len(text) + 1)
        (folder / "large.txt").write_bytes(repeated[: MEGABYTES.value * 10**6])
    if not number:
        return
    random = np.random.default_rng(0)
    begins, lengths = random.integers(len(text) - 10**4, size=number), random.geometric(1 / 300, number)
    with (folder / "many.jsonl").open("w") as file:
        for begin, length in zip(begins.tolist(), lengths.tolist()):
            file.write(json.dumps({"text": f"{begin}: {text[begin : begin + length]}"}) + "\n")


def measure(place: pathlib.Path) -> None:
    """Prints seconds, and megabytes at the peak of this process and of the largest of its workers."""
    begins = [time.perf_counter()]
    if STEP.value == "prepare":
        kind = TextSource if FILES.value or MEGABYTES.value else JsonLinesSource
        bpe = TokenizersVocabularyConfig(model_file=TOKENIZER.value) if TOKENIZER.value else None
        prepare(kind(folder=DOCUMENTS_IN.value), bpe or BytesVocabularyConfig(), place / "store", WORKERS.value)
    else:
        documents = TokenStore(place / "store").split("train")
        begins.append(time.perf_counter())
        config = LanesReaderConfig()
        reader = LanesReader(documents, config.num_lanes, config.segment_length, 512)
        reader.batch(0, range(config.num_lanes))
    begins.append(time.perf_counter())
    # Not of `getrusage`: a process has the peak of the one that started it.
    (peak,) = re.findall(r"VmHWM:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())
    worker = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    seconds = ", ".join(f"{seconds:.2f} s" for seconds in np.diff(begins))
    print(f"{STEP.value}: {seconds}; {int(peak) / 1000:,.0f} MB, worker {worker / 1000:,.0f} MB", flush=True)


def serve_bucket(stack: contextlib.ExitStack):
    """A simulated bucket, which this process serves to its children."""
    sys.path.append(str(pathlib.Path(__file__).parent.parent / "tests"))
    import pytest
    from fake_gcs import fake_gcs  # type: ignore[import-not-found]

    return stack.enter_context(fake_gcs(stack.enter_context(pytest.MonkeyPatch.context())))


def upload(folder: pathlib.Path, bucket) -> None:
    """Puts those files into the bucket that are not there yet."""
    for path in folder.iterdir():
        if (name := f"documents/{path.name}") not in bucket.objects:
            bucket.put(name, path.read_bytes())


def main(_) -> None:
    if STEP.value:
        measure(pathlib.Path(PLACE.value))
        return
    for number in [0] if FILES.value or MEGABYTES.value else DOCUMENTS.value:
        with tempfile.TemporaryDirectory() as place, contextlib.ExitStack() as stack:
            folder = pathlib.Path(place) / "documents"
            write_documents(folder, number)
            print(f"{number or FILES.value or 1:,} documents", flush=True)
            settings = [f"--workers={WORKERS.value}", f"--tokenizer={TOKENIZER.value}", f"--place={place}"]
            settings += [f"--files={FILES.value}", f"--megabytes={MEGABYTES.value}"]
            settings.append(f"--documents_in={'gs://bucket/documents' if BUCKET.value else folder}")
            bucket = serve_bucket(stack) if BUCKET.value else None
            for step in ("prepare", "read", *["prepare"] * bool(ADDED.value)):
                if bucket:
                    upload(folder, bucket)
                subprocess.run([sys.executable, __file__, f"--step={step}", *settings], check=True)
                if step == "read" and ADDED.value:
                    write_files(folder, range(FILES.value, FILES.value + ADDED.value))


if __name__ == "__main__":
    app.run(main)
