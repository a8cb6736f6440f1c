"""Documents on gs://, in a fake bucket that can fail, beside the same documents on a disk."""

import collections
import dataclasses
import gzip
import hashlib
import io
import json
import threading
import time

import pyarrow
import pyarrow.parquet
import pytest
from backports import zstd
from fake_gcs import DROPPED

from meliad_like.data.preparation import prepare, prepare_part
from meliad_like.data.token_store import FILES_NAME, STORE_NAME, TokenStore
from meliad_like.errors import UserError
from meliad_like.sources.base import SOURCES, open_source, source_fingerprint
from meliad_like.sources.files import StandardLibrarySource, TextSource
from meliad_like.sources.records import JsonLinesSource
from meliad_like.vocabularies.base import BytesVocabularyConfig

BYTES = BytesVocabularyConfig()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def records(number, word):
    return [{"text": f"{word} {i} é\n" * (i + 1), "name": f"{word}{i}"} for i in range(number)]


def lines(number, word):
    return "".join(json.dumps(record) + "\n" for record in records(number, word)).encode()


def parquet(number):
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records(number, "x")), file, compression="none")
    return file.getvalue()


@pytest.fixture
def folders(tmp_path):
    """A folder for each kind of source, with files that are left out."""
    files = {
        f"text/books/{split}/{i}.txt": f"{split} {i}\r\n".encode() * 9 for split in ("train", "dev") for i in range(5)
    }
    files |= {"text/notes.md": b"no document", "text/.hidden/a.txt": b"hidden", "text/vendor/a.txt": b"excluded"}
    files |= {f"repositories/{name}/src/a.py": b"x = 1\n" for name in "abcdefgh"}
    files |= {
        "jsonl/train.jsonl": lines(30, "plain"),
        "jsonl/train-1.jsonl.gz": gzip.compress(lines(30, "gzip")),
        "jsonl/test.json.zst": zstd.compress(lines(5, "zstd")),
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    (tmp_path / "parquet").mkdir()
    table = pyarrow.Table.from_pylist(records(50, "row"))
    pyarrow.parquet.write_table(table, tmp_path / "parquet" / "a.parquet", row_group_size=9)
    return tmp_path


def source(kind, folder):
    return SOURCES[kind](folder=str(folder), exclude=("vendor",))


def upload(bucket, folder):
    for path in paths(folder):
        bucket.put(path.relative_to(folder.parent).as_posix(), path.read_bytes())


def paths(folder):
    return [path for path in folder.rglob("*") if path.is_file()]


def files(folder):
    """All files of a token store but what it says of a place and its times."""
    found = {str(path.relative_to(folder)): path.read_bytes() for path in paths(folder)}
    saved = json.loads(found.pop(STORE_NAME))
    contents = {name: (size, content) for name, (size, _, content) in json.loads(found.pop(FILES_NAME)).items()}
    return found, contents, {name: saved[name] for name in saved if name not in ("folder", "files", "checksum")}


@pytest.mark.parametrize("kind", ["text", "repositories", "jsonl", "parquet"])
def test_a_store_of_documents_in_a_bucket_is_that_of_a_disk(kind, folders, bucket, tmp_path, capsys):
    """In one process, in two, and in parts."""
    upload(bucket, folders / kind)
    here, there = source(kind, folders / kind), source(kind, f"gs://bucket/{kind}")
    prepare(here, BYTES, tmp_path / "here", 1)
    for workers in (1, 2) if kind == "text" else (1,):
        prepare(there, BYTES, tmp_path / f"there{workers}", workers)
        assert files(tmp_path / f"there{workers}") == files(tmp_path / "here")
    for part in 1, 2, 3:
        prepare_part(there, BYTES, tmp_path / "parts", part, 3, 1)
    prepare(there, BYTES, tmp_path / "parts", 1)
    assert files(tmp_path / "parts") == files(tmp_path / "here")
    capsys.readouterr()
    prepare(there, BYTES, tmp_path / "parts", 1)
    assert "reusing the token store" in capsys.readouterr().err


@pytest.mark.parametrize("workers", [1, 2])
def test_there_is_a_request_for_all_files_and_one_for_each(workers, bucket, tmp_path):
    """In a bucket a request takes longer than the bytes of a small file, so that many are waited for at once."""
    for i in range(60):
        bucket.put(f"docs/{i}.txt", b"a text")
    requests, waiting, most, lock = collections.Counter(), 0, 0, threading.Lock()

    def refuse(method, name):
        nonlocal waiting, most
        with lock:
            requests.update([name])
            waiting += 1
            most = max(most, waiting)
        time.sleep(0.01)
        with lock:
            waiting -= 1

    bucket.refuse = refuse
    config = TextSource(folder="gs://bucket/docs", splits_by_name=False, validation_documents=("1",))
    prepare(config, BYTES, tmp_path / "store", workers)
    assert requests.pop("") <= 2 and set(requests.values()) == {1} and len(requests) == 60 and most > 8
    # What is added is read alone.
    requests.clear()
    bucket.put("docs/new.txt", b"a text")
    store = prepare(config, BYTES, tmp_path / "store", 1)
    assert store.version == 2 and requests["docs/new.txt"] == 1 and set(requests) == {"", "docs", "docs/new.txt"}


@pytest.mark.parametrize("kind", ["plain", "gzip", "zstd", "parquet"])
def test_a_file_of_records_is_read_once(kind, bucket, tmp_path):
    packed = {"plain": (".jsonl", bytes), "gzip": (".jsonl.gz", gzip.compress), "zstd": (".jsonl.zst", zstd.compress)}
    suffix, pack = packed.get(kind, (".parquet", lambda _: parquet(300)))
    bucket.put(f"once/train{suffix}", content := pack(lines(300, "x")))
    sent, source = bucket.sent, SOURCES["parquet" if kind == "parquet" else "jsonl"]
    config = source(folder="gs://bucket/once", validation_documents=("x3",), name_field="name")
    store = prepare(config, BYTES, tmp_path / "store", 1)
    assert bucket.sent - sent == len(content)
    saved = json.loads((store.folder / FILES_NAME).read_text())
    assert saved[f"train{suffix}"][2] == hashlib.sha256(content).hexdigest()


def test_a_large_file_is_streamed(bucket):
    """The first of its records needs the first of its bytes."""
    bucket.put("large/a.jsonl", lines(3000, "x"))
    assert len(bucket.objects["large/a.jsonl"][0]) > 5e7
    opened, sent = open_source(JsonLinesSource(folder="gs://bucket/large")), bucket.sent
    assert next(iter(opened.references()))().name == "a.jsonl:1"
    assert bucket.sent - sent < 1.2e7


def test_one_file_in_a_bucket(folders, bucket):
    upload(bucket, folders / "jsonl")
    opened = open_source(JsonLinesSource(folder="gs://bucket/jsonl/train-1.jsonl.gz"))
    assert len([reference() for reference in opened.references()]) == 30


@pytest.fixture
def without_waiting(monkeypatch):
    monkeypatch.setattr("gcsfs.retry.min", lambda *_: 0, raising=False)


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_dropped_connections_change_nothing(kind, folders, bucket, tmp_path, without_waiting):
    """Two of three requests fail."""
    upload(bucket, folders / kind)
    prepare(source(kind, folders / kind), BYTES, tmp_path / "here", 1)
    tries = collections.Counter()

    def refuse(method, name):
        tries[name] += 1
        return DROPPED if tries[name] % 3 else None

    bucket.refuse = refuse
    prepare(source(kind, f"gs://bucket/{kind}"), BYTES, tmp_path / "there", 1)
    assert tries.total() > 10 and files(tmp_path / "there") == files(tmp_path / "here")


@pytest.mark.parametrize("status", [DROPPED, 403, 503])
@pytest.mark.parametrize("name", ["text/books/train/3.txt", "jsonl/train.jsonl", "parquet/a.parquet"])
def test_a_file_that_can_not_be_read_is_one_line(name, status, folders, bucket, tmp_path, without_waiting, capsys):
    """Where the contents are compared, and where they are tokenised. Nothing is left that looks like a store."""
    kind = name.split("/")[0]
    upload(bucket, folders / kind)
    line = f"^gs://bucket/{name} can't be read: [^\n]*; the same command tries it again$"
    config = source(kind, f"gs://bucket/{kind}")
    opened = open_source(config)
    bucket.refuse = lambda method, asked: status if asked == name else None
    with pytest.raises(UserError, match=line):
        source_fingerprint(config, opened)
    with pytest.raises(UserError, match=line):
        for reference in opened.references():
            reference()
    with pytest.raises(UserError, match=line):
        prepare(config, BYTES, tmp_path / "store", 1)
    assert not (tmp_path / "store").exists() and "Traceback" not in capsys.readouterr().err


def test_a_folder_that_can_not_be_listed(bucket, without_waiting):
    with pytest.raises(UserError, match="the text source has no documents in gs://bucket/none: there are no files"):
        open_source(TextSource(folder="gs://bucket/none"))
    for status in 403, 503, DROPPED:
        bucket.refuse = lambda method, name, status=status: status
        with pytest.raises(UserError, match="^gs://bucket/none can't be listed: [^\n]*$"):
            open_source(TextSource(folder="gs://bucket/none"))


def test_bad_documents_in_a_bucket_are_listed_as_on_a_disk(bucket, tmp_path):
    bucket.put("bad/a.txt", b"caf\xe9")
    bucket.put("bad/b.txt", b"")
    with pytest.raises(UserError, match="1 are not UTF-8 .gs://bucket/bad/a.txt is not UTF-8 .*; 1 are empty"):
        prepare(TextSource(folder="gs://bucket/bad"), BYTES, tmp_path / "store", 1)
    bucket.put("cut/a.jsonl.gz", gzip.compress(lines(99, "x"))[:-9])
    bucket.put("cut/b.jsonl.gz", b"no gzip")
    bucket.put("cut/c.jsonl", lines(1, "fine"))
    with pytest.raises(UserError, match="2 can't be read .gs://bucket/cut/a.jsonl.gz cannot be decompressed"):
        prepare(JsonLinesSource(folder="gs://bucket/cut"), BYTES, tmp_path / "store", 1)


def test_documents_that_changed_in_a_bucket(bucket, tmp_path):
    for i in range(9):
        bucket.put(f"docs/{i}.txt", b"a text")
    prepare(TextSource(folder="gs://bucket/docs"), BYTES, tmp_path / "store", 1)
    bucket.put("docs/3.txt", b"a text")  # a new generation, not another content
    prepare(TextSource(folder="gs://bucket/docs"), BYTES, tmp_path / "store", 1)
    bucket.put("docs/3.txt", b"another")
    with pytest.raises(UserError, match="documents in gs://bucket/docs, which have changed since"):
        prepare(TextSource(folder="gs://bucket/docs"), BYTES, tmp_path / "store", 1)
    # Machines that have the store alone: the documents are not there, or not for them.
    bucket.objects.clear()
    TokenStore(tmp_path / "store").check_documents(TextSource(folder="gs://bucket/docs"))
    bucket.refuse = lambda method, name: 403
    TokenStore(tmp_path / "store").check_documents(TextSource(folder="gs://bucket/docs"))
    with pytest.raises(UserError, match="the token store gs://bucket/store can't be written or read: Forbidden"):
        prepare(StandardLibrarySource(), BYTES, "gs://bucket/store", 1)


def test_a_store_grows_in_a_bucket(bucket, cache, tmp_path):
    """A store in a bucket grows as one on a disk. The same command completes a version whose copy was interrupted."""
    for i in range(30):
        bucket.put(f"docs/{i}.txt", b"a text " * i + b"a")
    source, place = TextSource(folder="gs://bucket/docs"), "gs://bucket/grown"
    for folder in place, tmp_path / "here":
        old = prepare(source, BYTES, folder, 1)
    bucket.put("docs/new.txt", b"another text")
    bucket.refuse = lambda method, name: 403 if method == "POST" and name == "grown/version-2/store.json" else None
    with pytest.raises(UserError, match="grown can't be written or read: .* the same command tries again"):
        prepare(source, BYTES, place, 1)
    assert TokenStore(place).fingerprint == old.fingerprint
    bucket.refuse = lambda method, name: None
    assert prepare(source, BYTES, place, 1).version == prepare(source, BYTES, tmp_path / "here", 1).version == 2
    there = {name.removeprefix("grown/"): content for name, (content, _) in bucket.objects.items() if "grown/" in name}
    assert there == {str(path.relative_to(tmp_path / "here")): path.read_bytes() for path in paths(tmp_path / "here")}
    # Its vocabulary is read without its tokens.
    bucket.put("grown/train/more", bytes(10**6))
    sent, _ = bucket.sent, TokenStore(place).vocabulary
    assert bucket.sent - sent < 10**5
    names = [name for split in ("train", "validation", "test") for name in TokenStore(place).split(split).names]
    assert len(names) == 31 and "new" in names
    assert "new" not in [*TokenStore(place).read_by([old.fingerprint]).split("train").names]


def test_a_store_is_made_in_a_bucket(folders, bucket, cache, tmp_path, capsys):
    """On the disk, from which it is copied: again, after that was interrupted, without making it again."""
    config = source("jsonl", folders / "jsonl")
    prepare(config, BYTES, tmp_path / "here", 1)
    with pytest.raises(UserError, match="--part makes a part of a token store on a disk .*, not of gs://bucket/store"):
        prepare_part(config, BYTES, "gs://bucket/store", 1, 2)
    bucket.refuse = lambda method, name: 403 if method == "POST" and name == "store/train/tokens.bin" else None
    refused = "^the token store gs://bucket/store can't be written or read: [^\\n]*; the same command tries again$"
    with pytest.raises(UserError, match=refused):
        prepare(config, BYTES, "gs://bucket/store", 1)
    with pytest.raises(UserError, match="there is no token store at gs://bucket/store"):
        TokenStore("gs://bucket/store")
    bucket.refuse = lambda method, name: None
    capsys.readouterr()
    store = prepare(config, BYTES, "gs://bucket/store", 1)
    assert "tokenising" not in capsys.readouterr().err
    there = {name.removeprefix("store/"): content for name, (content, _) in bucket.objects.items()}
    assert there == {str(path.relative_to(tmp_path / "here")): path.read_bytes() for path in paths(tmp_path / "here")}
    # The machine that made it needs no other copy.
    assert store.split("train").lengths.size == 60 and not list(cache.rglob("prepared/gs*"))
    prepare(config, BYTES, "gs://bucket/store", 1)
    shown = capsys.readouterr().err
    assert "reusing the token store gs://bucket/store" in shown and "copying gs" not in shown
    with pytest.raises(UserError, match="the token store gs://bucket/store was made by other source settings"):
        prepare(dataclasses.replace(config, empty="skip"), BYTES, "gs://bucket/store", 1)
    bucket.put("other/file", b"")
    with pytest.raises(UserError, match="gs://bucket/other is neither empty nor a token store"):
        prepare(config, BYTES, "gs://bucket/other", 1)
