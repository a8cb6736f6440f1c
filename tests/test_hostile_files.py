"""Truncated, overwritten or malicious files: a one-line error, and no code from the file is executed."""

import errno
import gzip
import json
import os
import pickle
import shutil
import textwrap
from pathlib import Path

import forked
import hypothesis.strategies as st
import numpy as np
import pytest
from backports import zstd
from checkpoint_states import abstract, assert_same_bits, make_state, save_all
from etils import epath
from fuzzing import FEW
from hypothesis import assume, example, given, settings

from meliad_like.config import from_json, parse, to_json
from meliad_like.conversion.meliad import read_meliad
from meliad_like.data.preparation import prepare
from meliad_like.data.token_store import TokenStore
from meliad_like.errors import UserError
from meliad_like.generation.reading import load_state
from meliad_like.sources.base import open_source
from meliad_like.sources.files import TextSource
from meliad_like.sources.records import JsonLinesSource
from meliad_like.training import metrics
from meliad_like.training.checkpoints import Checkpoints
from meliad_like.training.metrics import MetricsWriter, read_rows
from meliad_like.vocabularies.base import BytesVocabularyConfig

few = settings(FEW, max_examples=60)


@st.composite
def harms(draw):
    """Kinds of damage of a file: (kind, position, replacement)."""
    kind = draw(st.sampled_from(["flip", "cut", "insert", "replace", "json", "delete"]))
    place = draw(st.floats(0, 1, exclude_max=True))
    content = draw(st.one_of(st.binary(max_size=40), st.sampled_from([b"", b"null", b"[]", b"{}", b"[" * 100_000])))
    return kind, place, content


def harm(path: Path, kind: str, place: float, content: bytes) -> None:
    before = path.read_bytes()
    index = int(place * len(before))
    if kind == "flip" and before:
        path.write_bytes(before[:index] + bytes([before[index] ^ (1 << len(content) % 8)]) + before[index + 1 :])
    elif kind == "cut":
        path.write_bytes(before[:index])
    elif kind == "insert":
        path.write_bytes(before[:index] + content + before[index:])
    elif kind == "replace":
        path.write_bytes(content)
    elif kind == "delete":
        path.unlink()
    elif path.suffix == ".json":
        path.write_text(json.dumps(other_values(json.loads(before), index)))


def other_values(tree, index):
    """The same JSON with one value of another type or size."""
    if isinstance(tree, dict) and tree:
        name = sorted(tree)[index % len(tree)]
        return tree | {name: other_values(tree[name], index // len(tree))}
    return [None, -1, 2**70, "../../x", [], {}, [None], True][index % 8]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    for name, text in {"a": "one two\n", "b": "three é", "c": "x" * 300, "held": "four"}.items():
        (folder / f"{name}.txt").write_text(text)
    source = TextSource(folder=str(folder), test_documents=("held",))
    return prepare(source, BytesVocabularyConfig(), folder / "store", num_workers=1)


def files_below(folder):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())


STORE_FILES = ["store.json", "vocabulary.json"]
STORE_FILES += [
    f"{split}/{name}" for split in ("train", "test") for name in ("tokens.bin", "documents.npy", "names.txt")
]


@few
@given(st.sampled_from(STORE_FILES), harms())
@example("train/documents.npy", ("delete", 0.0, b""))
@example("store.json", ("json", 0.0, b""))
def test_a_token_store(store, tmp_path_factory, name, damage):
    """Either a UserError, or documents of the same number and lengths: a flipped token may be another valid one."""
    folder = tmp_path_factory.mktemp("damaged") / "store"
    shutil.copytree(store.folder, folder)
    harm(folder / name, *damage)
    try:
        opened = TokenStore(folder)
        assert opened.vocabulary.fingerprint == store.vocabulary.fingerprint
        for split in ("train", "test"):
            found, expected = opened.split(split), store.split(split)
            np.testing.assert_array_equal(found.lengths, expected.lengths)
            np.testing.assert_array_equal(found.num_bytes.sum(), expected.num_bytes.sum())
            for document, length in enumerate(found.lengths):
                found.tokens(document, 0, int(length))
    except UserError as error:
        assert "\n" not in str(error)


JSON_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["text", "name"]), inner)),
    max_leaves=4,
)


@few
@given(
    st.lists(st.one_of(st.binary(max_size=20), JSON_VALUES.map(lambda value: json.dumps(value).encode())), max_size=5),
    st.sampled_from(["", ".gz", ".zst"]),
    st.one_of(st.none(), harms()),
    st.sampled_from(["", "name"]),
)
@example([b'{"text": "\\ud800"}'], "", None, "")
@example([b"[" * 100_000], "", None, "")
@example([b'{"text": "a", "name": {"text": 1}}'], "", None, "name")
@example([b'{"text": "a", "name": "\\ud800"}'], "", None, "name")
@example([b'{"text": ' + b"1" * 5000 + b"}"], "", None, "")
@pytest.mark.thorough
def test_json_lines(tmp_path_factory, lines, suffix, damage, name_field):
    path = tmp_path_factory.mktemp("lines") / f"documents.jsonl{suffix}"
    compress = {"": bytes, ".gz": gzip.compress, ".zst": zstd.compress}[suffix]
    path.write_bytes(compress(b"\n".join(lines)))
    if damage is not None:
        harm(path, *damage)
    config = JsonLinesSource(folder=str(path), name_field=name_field)
    try:
        for reference in open_source(config).references():
            document = reference()
            assert (
                document.text.strip() and document.text.encode() and document.split in ("train", "validation", "test")
            )
    except UserError as error:
        assert "\n" not in str(error)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    save_all(folder, [1, 2])
    return folder


@settings(few, max_examples=25)
@given(st.integers(0, 10_000), harms())
@example(0, ("replace", 0.0, b'{"../../x": [1, 2]}'))
@example(0, ("replace", 0.0, b"[]"))
def test_a_checkpoint(checkpoints, tmp_path_factory, which, damage):
    """Restoring returns the saved arrays bit for bit, or those of the checkpoint before."""
    folder = tmp_path_factory.mktemp("damaged") / "checkpoints"
    shutil.copytree(checkpoints, folder)
    # The manifest first, which says what the others should be.
    names = ["manifest.json", *files_below(folder / "2")]
    name = names[which % len(names)]
    # In its constructor orbax itself raises an error for a metadata file that is JSON, but no dictionary.
    assume(name != "_CHECKPOINT_METADATA" or damage[0] not in ("json", "replace"))
    harm(folder / "2" / name, *damage)
    with Checkpoints(folder) as opened:
        restored, metadata = opened.restore(abstract(make_state()))
    assert_same_bits(restored, make_state(metadata["step"]))


@few
@given(harms())
def test_a_saved_config(tmp_path_factory, damage):
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(to_json(parse()))
    harm(path, *damage)
    try:
        from_json(path.read_bytes().decode(errors="replace") if path.exists() else "")
    except UserError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("line", ["x", "[]", '{"kind": "train"}', '{"step": "3", "kind": "train"}', "\x00"])
def test_a_line_of_the_metrics(tmp_path, line, capsys):
    """It ends a plot, and no training."""
    path, good = tmp_path / "metrics.jsonl", '{"step": 1, "kind": "train"}\n'
    path.write_text(good + line + "\n" + good)
    with pytest.raises(UserError, match=rf"{path} is damaged: line 2 is (damaged|not JSON): "):
        read_rows(path)
    with MetricsWriter(tmp_path, 2, 3):
        pass
    assert path.read_text() == good + good
    assert f"warning: {path} is damaged (line 2 is" in (said := capsys.readouterr().out)
    assert "2 of 2 rows until step 2 are kept" in said


def test_metrics_that_are_cut_missing_or_unreadable(tmp_path, capsys, monkeypatch):
    path, good = tmp_path / "metrics.jsonl", '{"step": 1, "kind": "train"}\n'
    logged = {"rows": 2, "unlogged": {}}
    for content in (good, good + '{"step": 2, "ki', ""):
        path.write_text(content)
        with MetricsWriter(tmp_path, 2, 3, logged=logged) as writer:
            assert writer.num_rows == (1 if content else 0)
        assert f"{writer.num_rows} of 2 rows until step 2 are kept" in capsys.readouterr().out
    path.unlink()
    with MetricsWriter(tmp_path, 2, 3, logged=logged) as writer:
        assert writer._identity()
    assert "rows are missing" in capsys.readouterr().out

    def unreadable(_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    path.write_text(good + good)
    with monkeypatch.context() as bad:
        bad.setattr(type(epath.Path(path)), "read_bytes", unreadable)
        assert metrics._readable_rows(epath.Path(path)) == ([], "cannot read it: Input/output error")


def test_a_full_disk_is_one_line_wherever_it_is_met():
    """/dev/full is a full disk, on which the first write of metrics fails."""
    program = """
        from meliad_like.command_line import Command
        def main():
            with open("/dev/full", "a") as file:
                file.write("a line")
        Command(None).run(main)
    """
    result = forked.run("-c", textwrap.dedent(program))
    assert result.returncode == 2
    assert result.stderr == "error: the disk is full: a file could not be written; free some space\n"


def test_a_full_disk_under_a_run_prints_nothing_of_its_own(tmp_path):
    """A limit on the size of files simulates the full disk."""
    program = f"""
        import resource
        from meliad_like.training.metrics import MetricsWriter
        try:
            with MetricsWriter({str(tmp_path)!r}, 0, 10) as writer:
                writer.write(1, {{"loss": 1.0}})
                resource.setrlimit(resource.RLIMIT_FSIZE, (40, 40))
                writer.write(2, {{"loss": 1.0}})
        except OSError as error:
            print(error.strerror)
    """
    result = forked.run("-c", textwrap.dedent(program))
    assert (result.stdout.strip(), result.stderr) == ("File too large", "")


@pytest.mark.parametrize(
    ("folder", "text"),
    [("file", "File exists"), ("file/below", "Not a directory"), (".", None), ("n" * 300, "File name")],
)
def test_a_path_that_the_system_refuses_is_one_line(tmp_path, folder, text):
    (tmp_path / "file").touch()
    program = f"""
        import pathlib
        from meliad_like.command_line import Command
        Command(None).run(lambda: pathlib.Path({str(tmp_path / folder)!r}).mkdir(parents=True, exist_ok=True))
    """
    result = forked.run("-c", textwrap.dedent(program))
    assert result.returncode == (0 if text is None else 2)
    assert result.stderr.startswith(f"error: {tmp_path / folder}: {text}" if text else "")
    assert result.stderr.endswith("; name another path\n" if text else "") and result.stderr.count("\n") == bool(text)


class Malicious:
    """Unpickled, it writes a file."""

    def __init__(self, path: Path):
        self._path = path

    def __reduce__(self):
        return Path.touch, (self._path,)


def test_nothing_is_unpickled(store, tmp_path):
    """With `allow_pickle`, loading the arrays would run code, which the test shows first."""
    written = tmp_path / "written"
    array = np.array([Malicious(written)], dtype=object)
    planted = tmp_path / "planted.npy"
    np.save(planted, array, allow_pickle=True)
    np.load(planted, allow_pickle=True)
    assert written.exists()
    written.unlink()

    folder = tmp_path / "store"
    shutil.copytree(store.folder, folder)
    for content in (planted.read_bytes(), pickle.dumps(Malicious(written))):
        (folder / "train" / "documents.npy").write_bytes(content)
        with pytest.raises(UserError, match=r"documents\.npy or names\.txt is damaged"):
            TokenStore(folder).split("train")
    np.savez(tmp_path / "carry.npz", facts=array, key=array)
    with pytest.raises(UserError, match="is damaged, or no saved carry"):
        load_state(tmp_path / "carry.npz", {}, {})
    np.savez(tmp_path / "theirs.npz", embedding=array)
    for name in ("theirs.npz", "planted.npy"):
        with pytest.raises(UserError):
            read_meliad(tmp_path / name)
    assert not written.exists()


@pytest.mark.parametrize(
    "line",
    [
        "import os",
        "from os import path",
        "DecoderConfig.num_layers = @os.getpid()",
        "DecoderConfig.num_layers = __import__('os').getpid()",
        "DecoderConfig.num_layers = (lambda: 3)()",
    ],
)
def test_a_gin_file_runs_nothing(tmp_path, line):
    (tmp_path / "hostile.gin").write_text(f"{line}\n")
    with pytest.raises(UserError):
        parse([str(tmp_path / "hostile.gin")])
