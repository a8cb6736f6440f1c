#!/usr/bin/env bash
# Compares token stores of documents on gs://, s3://, az:// or hf:// with that of the same documents on a disk, once,
# by a person with a network: ten minutes for each. Needs the extra of the scheme (gcs, s3, az) and its credentials.
#
#   bash benchmarks/remote_sources.sh gs://BUCKET/FOLDER       # an empty folder, which is deleted at the end
#   bash benchmarks/remote_sources.sh s3://BUCKET/FOLDER
#   bash benchmarks/remote_sources.sh az://CONTAINER/FOLDER
#   bash benchmarks/remote_sources.sh hf://datasets/YOU/NAME   # an empty data set (hf repo create NAME --repo-type dataset)
#
# For hf:// it also prepares 500 MB of PG-19 by name, and loads GPT-2 by name. It prints seconds, and ends with "all the
# same", or with the first difference.
set -euo pipefail
place=${1:?name a folder on gs://, s3://, az:// or hf://}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export XDG_CACHE_HOME=$work/cache

python - "$work" "$place" <<'PYTHON'
"""1,000 texts of 2 kB, the same as JSON lines (plain, gzip, zstd) and as parquet files, 50 MB; copied to the place."""
import gzip
import json
import pathlib
import sys
import sysconfig
import time

import pyarrow as pa
from etils import epath
from huggingface_hub import HfApi
from pyarrow import parquet

from meliad_like.sources.records import zstd
from meliad_like.remote import any_path, copy_folder

folder, place = pathlib.Path(sys.argv[1]) / "documents", sys.argv[2]
library = pathlib.Path(sysconfig.get_paths()["stdlib"])
text = "".join(path.read_text("utf-8", "ignore") for path in sorted(library.glob("*.py")))
many = [text[i * 977 % (len(text) - 2000) :][:2000] for i in range(1000)]
large = [text[i * 977 % (len(text) - 20000) :][:20000] for i in range(500)]
for kind in ("text", "jsonl", "parquet"):
    (folder / kind).mkdir(parents=True)
for i, document in enumerate(many):
    (folder / "text" / f"{i}.txt").write_text(document)
lines = "".join(json.dumps({"text": document}) + "\n" for document in large).encode()
(folder / "jsonl" / "a.jsonl").write_bytes(lines)
(folder / "jsonl" / "b.jsonl.gz").write_bytes(gzip.compress(lines))
(folder / "jsonl" / "c.jsonl.zst").write_bytes(zstd.compress(lines))
parquet.write_table(pa.table({"text": large}), folder / "parquet" / "train-0.parquet", row_group_size=100)
parquet.write_table(pa.table({"text": large[:50]}), folder / "parquet" / "test-0.parquet")
begin = time.time()
if place.startswith("hf://datasets/"):
    HfApi().upload_folder(repo_id=place.removeprefix("hf://datasets/"), folder_path=folder, repo_type="dataset")
else:
    copy_folder(epath.Path(folder), any_path(place))
print(f"copied to {place}: {time.time() - begin:.0f} s")
PYTHON

prepare() {  # prepare SOURCE FOLDER STORE
    local begin=$SECONDS
    python -m meliad_like.prepare --gin_param="RunConfig.source = '$1'" --gin_param="FolderSourceConfig.folder = '$2'" \
        --store="$3" 2>"$work/log" || { cat "$work/log" >&2; exit 1; }
    echo "$1 $2: $((SECONDS - begin)) s"
}

compare() {  # compare STORE STORE: all files but store.json and files.json, which name the folder and times
    diff -r --exclude=store.json --exclude=files.json "$1" "$2" || { echo "$1 and $2 differ"; exit 1; }
}

for kind in text jsonl parquet; do
    prepare "$kind" "$work/documents/$kind" "$work/here_$kind"
    prepare "$kind" "$place/$kind" "$work/there_$kind"
    compare "$work/here_$kind" "$work/there_$kind"
    prepare "$kind" "$place/$kind" "$work/there_$kind"   # compares one listing
done

if [[ $place == hf://* ]]; then
    python -m meliad_like.prepare --gin_file=task/pg19_huggingface.gin --gin_param="RunConfig.vocabulary = 'bytes'" \
        --gin_param="HuggingFaceSource.exclude = ('train-0000[1-9]*', 'train-000[12]*')" --store="$work/pg19"
    python -c 'import meliad_like; print(meliad_like.load("hf://openai-community/gpt2").score("Once upon a time").bits_per_byte)'
else
    prepare text "$place/text" "$place/store"
    python - "$place/store" "$work/here_text" <<'PYTHON'
import sys

from meliad_like.data.token_store import TokenStore

there, here = map(TokenStore, sys.argv[1:])
assert there.info.splits == here.info.splits, (there.info, here.info)
assert there.split("train").tokens(0, 0, 99).tolist() == here.split("train").tokens(0, 0, 99).tolist()
PYTHON
fi
python -c 'import sys; from fsspec.core import url_to_fs; fs, path = url_to_fs(sys.argv[1]); fs.rm(path, recursive=True)' "$place"
echo "all the same"
