"""Time and peak memory of `prepare`, of opening the store, and of the first batch, by the number of documents.

python benchmarks/prepare_documents.py                          # 1,000, 100,000 and 1,000,000 small documents, bytes
python benchmarks/prepare_documents.py --megabytes=500          # one large document
python benchmarks/prepare_documents.py --tokenizer=FOLDER       # with a byte-level BPE

The documents are pieces of Python's standard library, 300 characters long in the mean, in one file of JSON lines.
"""

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

from meliad_like.data.files_source import TextSource
from meliad_like.data.preparation import prepare
from meliad_like.data.readers import LanesReader, LanesReaderConfig
from meliad_like.data.records_source import JsonLinesSource
from meliad_like.data.token_store import TokenStore
from meliad_like.data.tokenizers_vocabulary import TokenizersVocabularyConfig
from meliad_like.data.vocabulary import BytesVocabularyConfig

DOCUMENTS = flags.DEFINE_multi_integer("documents", [10**3, 10**5, 10**6], "Numbers of small documents.")
MEGABYTES = flags.DEFINE_integer("megabytes", 0, "The size of one document, instead of many small ones.")
TOKENIZER = flags.DEFINE_string("tokenizer", "", "File or folder of a byte-level BPE; by default tokens are bytes.")
WORKERS = flags.DEFINE_integer("workers", 2, "Processes that tokenise; 1: the process that writes does.")
STEP = flags.DEFINE_enum("step", None, ["prepare", "read"], "What to measure in the folder of --place alone.")
PLACE = flags.DEFINE_string("place", None, "Folder with the documents and the store.")


def write_documents(folder: pathlib.Path, number: int) -> None:
    """Writes a number of small documents, or with 0 one large one."""
    library = pathlib.Path(sysconfig.get_paths()["stdlib"])
    text = "".join(path.read_text("utf-8", "ignore") for path in sorted(library.glob("*.py")))
    folder.mkdir()
    if not number:
        repeated = text.encode() * (MEGABYTES.value * 10**6 // len(text) + 1)
        (folder / "large.txt").write_bytes(repeated[: MEGABYTES.value * 10**6])
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
        kind = TextSource if (place / "documents" / "large.txt").exists() else JsonLinesSource
        bpe = TokenizersVocabularyConfig(model_file=TOKENIZER.value) if TOKENIZER.value else None
        prepare(kind(folder=str(place / "documents")), bpe or BytesVocabularyConfig(), place / "store", WORKERS.value)
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


def main(_) -> None:
    if STEP.value:
        measure(pathlib.Path(PLACE.value))
        return
    for number in [0] if MEGABYTES.value else DOCUMENTS.value:
        with tempfile.TemporaryDirectory() as place:
            write_documents(pathlib.Path(place) / "documents", number)
            print(f"{number or 1:,} documents", flush=True)
            for step in ("prepare", "read"):
                settings = [f"--workers={WORKERS.value}", f"--tokenizer={TOKENIZER.value}"]
                words = [sys.executable, __file__, f"--step={step}", f"--place={place}", *settings]
                subprocess.run(words, check=True)


if __name__ == "__main__":
    app.run(main)
