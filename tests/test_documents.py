import errno
import gzip
import json
import os
from functools import partial

import numpy as np
import pyarrow.parquet
import pytest
from backports import zstd

from meliad_like.errors import UserError
from meliad_like.sources.base import (
    SOURCES,
    SPLITS,
    Document,
    EmptyDocumentError,
    NotUTF8Error,
    Source,
    fill_splits,
    open_source,
    source_fingerprint,
)
from meliad_like.sources.files import RepositoriesSource, TextSource
from meliad_like.sources.named_splits import splits_of_path


def write(folder, **texts):
    """Files `a__b.txt=...` as folder/a/b.txt."""
    for name, text in texts.items():
        path = folder / (name.replace("__", "/") + ".txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(folder)


def make(kind="standard_library", **settings):
    return SOURCES[kind](**settings)


def documents(**settings):
    """(split, name) -> text of all documents."""
    read = [reference() for reference in open_source(make(**settings)).references()]
    return {(document.split, document.name): document.text for document in read}


def fingerprint(config):
    return source_fingerprint(config, open_source(config))


def test_text_keeps_every_byte(tmp_path):
    text = "\ufeffone\r\n\ttwo  \n\n"
    assert documents(kind="text", folder=write(tmp_path, a__b=text), test_share=0.0, validation_share=0.0) == {
        ("train", "a/b"): text
    }


def test_other_encodings(tmp_path):
    """And the message for a file that isn't UTF-8 says how."""
    folder = write(tmp_path / "text", a="caf\xe9 \u2013\r\n".encode("cp1252"))
    settings = {"folder": folder, "splits_by_name": False, "test_share": 0.0, "validation_share": 0.0}
    with pytest.raises(NotUTF8Error, match="a.txt is not UTF-8 .*, name the encoding .* in FolderSourceConfig.en"):
        documents(kind="text", **settings)
    assert documents(kind="text", encoding="cp1252", **settings) == {("train", "a"): "caf\xe9 \u2013\r\n"}
    with pytest.raises(NotUTF8Error, match="a.txt is not ASCII .byte 0xe9 at offset 3.: convert it"):
        documents(kind="text", encoding="ascii", **settings)
    (tmp_path / "a.jsonl").write_bytes(json.dumps({"text": "caf\xe9"}, ensure_ascii=False).encode("cp1252"))
    assert list(documents(kind="jsonl", folder=str(tmp_path), encoding="cp1252").values()) == ["caf\xe9"]


def test_splits_by_lists(tmp_path):
    folder = write(tmp_path, a="1", b__c="2", d="3")
    found = documents(kind="text", folder=folder, validation_documents=("d",), test_documents=("b/c",))
    assert list(found) == [("train", "a"), ("test", "b/c"), ("validation", "d")]


def test_splits_by_folders(tmp_path):
    folder = write(tmp_path, train__a="1", train__b__c="2", test__a="3")
    assert list(documents(kind="text", folder=folder)) == [("train", "a"), ("train", "b/c"), ("test", "a")]


def test_file_beside_split_folders(tmp_path):
    with pytest.raises(UserError, match="paths named after splits, .* but b.txt is not: move or rename it"):
        documents(kind="text", folder=write(tmp_path, train__a="1", b="2"))


def test_splits_by_hash_are_stable_and_near_their_shares(tmp_path):
    folder = write(tmp_path, **{f"d{i}": "x" for i in range(400)})
    before = {name: split for split, name in documents(kind="text", folder=folder, test_share=0.2)}
    assert 50 < list(before.values()).count("test") < 110
    assert 5 < list(before.values()).count("validation") < 40
    write(tmp_path, another="x")
    after = {name: split for split, name in documents(kind="text", folder=folder, test_share=0.2)}
    assert {**after, **before} == after


def test_repositories(tmp_path):
    for path, text in {
        "b/z.py": "z = 1",
        "b/a/x.py": "x\n",
        "b/notes.md": "no",
        "b/.git/c.py": "no",
        "a/y.py": "y\n",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    (tmp_path / "setup.py").write_text("in no repository")
    found = documents(kind="repositories", folder=str(tmp_path), suffixes=(".py",), test_documents=("b",))
    assert found == {
        ("train", "a"): "# file: a/y.py\ny\n",
        ("test", "b"): "# file: b/a/x.py\nx\n# file: b/z.py\nz = 1\n",
    }


def test_repository_leaves_out_only_the_file_that_is_not_utf8(tmp_path):
    folder = write(tmp_path, r__a="fine", r__b=b"\xff")
    config = RepositoriesSource(folder=folder, suffixes=(".txt",), undecodable="skip")
    (document,) = (reference() for reference in open_source(config).references())
    assert "fine" in document.text
    assert "r/b.txt is not UTF-8" in document.skipped[0]


def test_standard_library_is_long_and_split():
    found = documents(kind="standard_library")
    sizes = {
        split: [len(text) for (s, _), text in found.items() if s == split] for split in ("train", "validation", "test")
    }
    assert sum(sizes["train"]) > 5e6
    assert sum(size > 1e5 for size in sizes["train"]) >= 8
    assert 1e5 < max(sizes["validation"]) and 1e5 < min(sizes["test"])
    assert found["validation", "json"].startswith("# file: json/__init__.py\n")
    assert not any("# file: test/" in text or "site-packages/" in text.split("\n")[0] for text in found.values())


def jsonl(*texts):
    return "".join(json.dumps({"id": f"n{i}", "text": text}) + "\n" for i, text in enumerate(texts)).encode()


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "jsonl.zst", "json.gz", "ndjson"])
def test_json_lines(tmp_path, ending):
    # The second as programs for Windows write it.
    plain = {
        "train-1": jsonl("a\nb", "é" * 300_000),
        "test": b"\xef\xbb\xbf" + jsonl("c").replace(b"\n", b"\r\n") + b"\n",
    }
    for name, data in plain.items():
        if ending.endswith("gz"):
            data = gzip.compress(data)
        elif ending.endswith("zst"):  # two frames, as parallel writers make them, one by `zstd --long=31`
            options = {zstd.CompressionParameter.window_log: 31, zstd.CompressionParameter.content_size_flag: False}
            long = zstd.ZstdCompressor(options=options)
            data = zstd.compress(data[:10]) + long.compress(data[10:]) + long.flush()
        (tmp_path / f"{name}.{ending}").write_bytes(data)
    found = documents(kind="jsonl", folder=str(tmp_path), name_field="id")
    assert found == {("test", "n0"): "c", ("train", "n0"): "a\nb", ("train", "n1"): "é" * 300_000}


def test_json_lines_with_their_compressed_copy(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl("a"))
    (tmp_path / "a.jsonl.zst").write_bytes(zstd.compress(jsonl("a")))
    with pytest.raises(UserError, match="a.jsonl.zst is a.jsonl again: remove one of them"):
        documents(kind="jsonl", folder=str(tmp_path))
    assert len(documents(kind="jsonl", folder=str(tmp_path), exclude=("*.zst",))) == 1


def test_json_lines_beside_those_named_after_splits(tmp_path):
    """Of blind.jsonl most documents would be for training."""
    for name in ("train", "blind"):
        (tmp_path / f"{name}.jsonl").write_bytes(jsonl("a"))
    with pytest.raises(UserError, match=r"named after splits, .* but blind.jsonl is not: move or rename it"):
        documents(kind="jsonl", folder=str(tmp_path))
    assert set(documents(kind="jsonl", folder=str(tmp_path), suffixes=("train.jsonl",))) == {("train", "train.jsonl:1")}
    listed = documents(kind="jsonl", folder=str(tmp_path), validation_documents=("blind.jsonl:1",))
    assert listed == {("train", "train.jsonl:1"): "a", ("validation", "blind.jsonl:1"): "a"}


LAYOUTS = {
    "text": (
        "books/{}/0.txt", "{}/books/0.txt", "a/b/{}/c/0.txt", "{}.txt", "ptb.{}.txt", "{}_00.txt", "split={}/0.txt",
        "{} 1.txt", "{} set/0.txt",
    ),
    "jsonl": ("{}.jsonl", "wiki/{}.jsonl", "en/{}/0.jsonl", "c4-{}.00000-of-01024.jsonl", "squad_{}.jsonl"),
    "parquet": ("data/{}-00000-of-00001.parquet", "split={}/lang=en/0.parquet", "en/{}-0.parquet"),
    "repositories": ("{}/repository/test/test.py",),
}  # fmt: skip
WORDS = [
    ("train", "validation", "test"), ("Train", "Dev", "TEST"), ("training", "val", "testing"), ("train", "eval"),
    ("trainset", "valData", "heldout"),
]  # fmt: skip


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize("words", WORDS, ids="-".join)
def test_splits_by_names_at_any_depth(tmp_path, kind, words):
    for number, layout in enumerate(LAYOUTS[kind]):
        for split, word in zip(SPLITS, words, strict=False):
            path = tmp_path / str(number) / layout.format(word)
            path.parent.mkdir(parents=True, exist_ok=True)
            if kind == "parquet":
                parquet(path, text=[split])
            else:
                path.write_bytes(jsonl(split) if kind == "jsonl" else split.encode())
        found = documents(kind=kind, folder=str(tmp_path / str(number)))
        assert [split for split, _ in found] == [text.split("\n")[-2:][0] for text in found.values()], layout
        assert len(found) == len(words), layout
        by_hash = documents(kind=kind, folder=str(tmp_path / str(number)), splits_by_name=False, validation_share=0.0)
        assert {split for split, _ in by_hash} <= {"train", "test"}, layout


PUBLISHED = {
    "SlimPajama": {
        "train/chunk1/example_train_0.jsonl.zst": "train",
        "validation/chunk1/example_holdout_0.jsonl.zst": "validation",
        "test/chunk1/example_holdout_1.jsonl.zst": "test",
    },
    "C4": {"en/c4-train.00000-of-01024.json.gz": "train", "en/c4-validation.00000-of-00008.json.gz": "validation"},
    "IWSLT": {"trn.jsonl": "train", "TED.dev2010.jsonl": "validation", "TED.tst2014.jsonl": "test"},
    "the Pile": {"train/00.jsonl.zst": "train", "val.jsonl.zst": "validation", "test.jsonl.zst": "test"},
    "MMLU": {
        "auxiliary_train/a.jsonl": "train",
        "dev/a_dev.jsonl": "validation",
        "val/a_val.jsonl": "validation",
        "test/a_test.jsonl": "test",
    },
    "a folder for evaluation": {
        "training/train.jsonl": "train",
        "evaluation/test.jsonl": "test",
        "evaluation/val_1.jsonl": "validation",
        "evaluation/train_questions.jsonl": "validation",
        "test/train_questions.jsonl": "test",
        "validation/heldout.jsonl": "validation",
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_folders_decide_in_published_layouts(tmp_path, name):
    for file in PUBLISHED[name]:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        compress = {".gz": gzip.compress, ".zst": zstd.compress}.get(file[file.rindex(".") :], bytes)
        (tmp_path / file).write_bytes(compress(jsonl("a")))
    found = documents(kind="jsonl", folder=str(tmp_path))
    assert {name.rpartition(":")[0]: split for split, name in found} == PUBLISHED[name]


def test_words_inside_of_words_titles_and_repositories_are_not_splits(tmp_path):
    names = ("contest/latest", "The Test of Time", "a training", "validity", "devtest/a")
    assert len(documents(kind="text", folder=write(tmp_path / "text", **dict.fromkeys(names[:4], "x")))) == 4
    assert not {"validation", "test"} & set(splits_of_path("devtest/contest.jsonl"))
    write(tmp_path / "code", a__tests__test="x", b__dev__eval="y")
    assert len(documents(kind="repositories", folder=str(tmp_path / "code"), suffixes=(".txt",), test_share=0.0)) == 2


@pytest.mark.parametrize(
    "files, message",
    [
        (("wiki/test.txt", "a.txt"), "such as wiki/test.txt.*, but a.txt is not: "),
        (("dev/0.txt", "devtest/0.txt"), "such as dev/0.txt.*, but devtest/0.txt is not: "),
        (("train/test.txt",), "train/test.txt is named after several splits .test, train.: "),
        (("train/test-00000-of-00001.txt",), "of-00001.txt is named after several splits .test, train.: "),
        (("evaluation/train.txt",), "evaluation/train.txt is named after several splits .train, validation.: "),
        (("test/1/train/0.txt",), "test/1/train/0.txt is named after several splits .test, train.: "),
        (("libxml_list.txt", "libxml_valid.txt"), "such as libxml_valid.txt.*, but libxml_list.txt is not: "),
    ],
)
def test_names_of_only_some_files_are_refused(tmp_path, files, message):
    """The message offers to deal documents by hashes only under the condition that no name means a split."""
    write(tmp_path, **{name.removesuffix(".txt"): "x" for name in files})
    way_out = "move or rename it, leave it out with TextSource.exclude, or, if no name means a split, set "
    with pytest.raises(UserError, match=f"{message}{way_out}FolderSourceConfig.splits_by_name = False$"):
        documents(kind="text", folder=str(tmp_path))
    assert len(documents(kind="text", folder=str(tmp_path), splits_by_name=False)) == len(files)


def test_shares_are_held_out_where_only_train_is_named_further_down(tmp_path):
    folder = write(tmp_path, **{f"wiki__train__{i}": "x" for i in range(200)})
    assert {split for split, _ in documents(kind="text", folder=folder, test_share=0.2)} == set(SPLITS)
    assert {split for split, _ in documents(kind="text", folder=f"{folder}/wiki", test_share=0.2)} == {"train"}
    # Some paths begin with it.
    write(tmp_path, train__0="x")
    assert {split for split, _ in documents(kind="text", folder=folder, test_share=0.2)} == set(SPLITS)


def test_names_stay_unique(tmp_path):
    """In folders that are not all named train, validation or test, and where only the suffix differs."""
    write(tmp_path, dev__a="1", validation__a="2", train__wiki__a="3", wiki__train__a="4")
    assert len(documents(kind="text", folder=str(tmp_path))) == 4
    for name in ("b.md", "b.txt"):
        (tmp_path / "train" / name).write_text("x")
    found = documents(kind="text", folder=str(tmp_path / "train"), suffixes=(".md", ".txt"), splits_by_name=False)
    assert sorted(name for _, name in found) == ["b.md", "b.txt", "wiki/a"]


def test_links(tmp_path):
    write(tmp_path, docs__train__a="1", elsewhere__b="2")
    docs = tmp_path / "docs"
    (docs / "validation").symlink_to(tmp_path / "elsewhere")
    (docs / "train" / "loop").symlink_to(docs)
    assert documents(kind="text", folder=str(docs)) == {("train", "a"): "1", ("validation", "b"): "2"}
    (docs / "test").symlink_to(docs / "train")
    (docs / "train" / "b.txt").symlink_to("a.txt")
    (docs / "train" / "c.txt").symlink_to(tmp_path / "elsewhere" / "b.txt")
    opened = open_source(TextSource(folder=str(docs)))
    assert opened.passed_over.startswith("3 files were passed over (3 with a link to others)")
    assert [reference().name for reference in opened.references()] == ["a", "c", "b"]
    write(tmp_path, code__r__sub__a="3")
    (tmp_path / "code" / "r" / "again").symlink_to(tmp_path / "code" / "r" / "sub")
    (found,) = documents(kind="repositories", folder=str(tmp_path / "code"), suffixes=(".txt",)).values()
    assert found == "# file: r/sub/a.txt\n3\n"


def test_a_folder_that_cannot_be_read(tmp_path, monkeypatch):
    def scandir(path):
        if str(path).endswith("validation"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read(path)

    write(tmp_path, train__a="1", validation__b="2")
    read = os.scandir
    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UserError, match="validation can't be read: Permission denied; leave it out with exclude"):
        documents(kind="text", folder=str(tmp_path))


def test_a_link_to_nothing(tmp_path):
    write(tmp_path, a="1")
    (tmp_path / "b.txt").symlink_to(tmp_path / "nowhere.txt")
    with pytest.raises(UserError, match="b.txt is a link to nothing: remove it, or leave it out"):
        documents(kind="text", folder=str(tmp_path))


@pytest.mark.parametrize("number", [3, 8, 35, 200])
def test_every_split_with_a_share_gets_a_document(number):
    """Deterministic, and only from a split that has several; more documents change little."""
    config, names = TextSource(), [f"d{i}" for i in range(number)]

    def assigned(names, config):
        references = [partial(Document, name, config.split_of(name, None), "x") for name in names]
        source = fill_splits(config, Source((references.copy,), len(names), (), by_share=True))
        return {document.name: document.split for document in (reference() for reference in source.references())}

    splits = assigned(names, config)
    assert set(splits.values()) == set(SPLITS)
    assert splits == assigned(names[::-1], config)
    changed = [name for name in names if splits[name] != config.split_of(name, None)]
    assert len(changed) == len(set(SPLITS) - {config.split_of(name, None) for name in names})
    more = assigned([*names, "another"], config)
    assert sum(more[name] != splits[name] for name in names) <= 1
    without_test = TextSource(test_share=0.0)
    assert "test" not in assigned(names, without_test).values()
    assert assigned(["d0"], config) == {"d0": config.split_of("d0", None)}


def parquet(path, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=3)


def test_parquet(tmp_path):
    texts = [f"text {i}" for i in range(200)]
    parquet(tmp_path / "train-1.parquet", id=list(range(200)), text=texts, unread=[None] * 200)
    parquet(tmp_path / "test.parquet", id=[7], text=["é".encode()])
    expected = {("train", str(i)): text for i, text in enumerate(texts)} | {("test", "7"): "é"}
    assert documents(kind="parquet", folder=str(tmp_path), name_field="id") == expected
    numbered = documents(kind="parquet", folder=str(tmp_path / "test.parquet"))
    assert numbered == {("test", "test.parquet:1"): "é"}


def test_parquet_with_mistakes(tmp_path):
    parquet(tmp_path / "a.parquet", body=["x", "y"], text=["fine", None], split=["train", "test"], id=["a", None])
    # It may be left out.
    with pytest.raises(EmptyDocumentError, match="a.parquet:2 is empty"):
        documents(kind="parquet", folder=str(tmp_path), splits_by_name=False)
    with pytest.raises(UserError, match="a.parquet:2 is of test by its field 'split', not read: write the rec"):
        documents(kind="parquet", folder=str(tmp_path), text_field="body")
    with pytest.raises(UserError, match="a.parquet:2: the field 'id' is not text but NoneType"):
        documents(kind="parquet", folder=str(tmp_path), text_field="body", name_field="id")
    with pytest.raises(UserError, match="a.parquet:1 has no field 'words'; it has 'body', 'text'"):
        documents(kind="parquet", folder=str(tmp_path), text_field="words")
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    with pytest.raises(UserError, match="a.parquet cannot be read as parquet"):
        documents(kind="parquet", folder=str(tmp_path))


def parquet_that_is_not_utf8(path):
    offsets = np.array([0, 5, 10], "<i4").tobytes()
    texts = pyarrow.StringArray.from_buffers(2, pyarrow.py_buffer(offsets), pyarrow.py_buffer(b"helloa\xffbcd"))
    parquet(path, text=texts)


def test_parquet_that_is_not_utf8(tmp_path):
    parquet_that_is_not_utf8(tmp_path / "a.parquet")
    with pytest.raises(UserError, match="a.parquet cannot be read as parquet: 'utf-8' codec can't decode byte 0xff"):
        documents(kind="parquet", folder=str(tmp_path))


def test_parquet_with_a_damaged_page(tmp_path):
    """The files after it are read all the same."""
    texts = [f"{i} " * 300 for i in range(300)]
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet", row_group_size=100)
    raw = bytearray((tmp_path / "a.parquet").read_bytes())
    raw[len(raw) // 2 - 100 : len(raw) // 2 + 100] = bytes(200)
    (tmp_path / "a.parquet").write_bytes(raw)
    parquet(tmp_path / "b.parquet", text=["fine"])
    *references, damaged, fine = open_source(make("parquet", folder=str(tmp_path))).references()
    assert [reference().text for reference in references] == texts[: len(references)]
    with pytest.raises(UserError, match=f"a.parquet cannot be read as parquet: .*after record {len(references)}."):
        damaged()
    assert fine().text == "fine" and len(references) >= 100


@pytest.mark.parametrize("compress, ending", [(gzip.compress, "gz"), (zstd.compress, "zst")])
def test_json_lines_cut_short(tmp_path, compress, ending):
    path = tmp_path / f"a.jsonl.{ending}"
    path.write_bytes(compress(jsonl(*map(str, range(9999))))[:-9])
    with pytest.raises(UserError, match=f"a.jsonl.{ending} cannot be decompressed"):
        documents(kind="jsonl", folder=str(path))


@pytest.mark.parametrize(
    "line, message",
    [
        (b"{", "a.jsonl:2 is not JSON"),
        (b"[1]", "a.jsonl:2 is not a JSON object but list"),
        (b'{"body": "x"}', "a.jsonl:2 has no field 'text'; it has 'body'"),
        (b'{"text": 3}', "a.jsonl:2: the field 'text' is not text but int"),
        (b'{"text": " "}', "a.jsonl:2 is empty"),
        (b'{"text": "\xff"}', "a.jsonl:2 is not UTF-8"),
        (b'{"text": "x", "split": "dev"}', "a.jsonl:2 is of validation by its field 'split'"),
        (rb'{"text": "\ud800"}', "a.jsonl:2 has an unpaired surrogate"),
    ],
)
def test_bad_line(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_bytes(jsonl("fine") + line + b"\n")
    with pytest.raises(UserError, match=message):
        documents(kind="jsonl", folder=str(tmp_path))


def test_fingerprint_follows_contents_not_place(tmp_path):
    configs = [TextSource(folder=write(tmp_path / place, a="one")) for place in ("here", "there")]
    first, second = map(fingerprint, configs)
    assert first == second
    write(tmp_path / "there", a="two")
    assert fingerprint(configs[1]) != first


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"kind": "books"},
            "source='books' is not one of huggingface, jsonl, memory_tasks, parquet, repositories, standard_library, ",
        ),
        ({"empty": "ignore"}, "empty='ignore' is not one of stop, skip"),
        ({"test_share": 0.6, "validation_share": 0.4}, "validation_share=0.4 and test_share=0.6 must"),
        ({"test_documents": ("a",), "validation_documents": ("a",)}, "a is both in validation_documents and in test"),
        (
            {"kind": "text", "folder": "/nowhere"},
            "no folder of documents at FolderSourceConfig.folder = '/nowhere': name yours with --gin_param=",
        ),
        ({"kind": "jsonl"}, "FolderSourceConfig.folder = '': name yours with --gin_param=\"FolderSourceConfig.folder"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(UserError, match=message):
        open_source(make(**settings))


@pytest.mark.parametrize("kind", ["text", "jsonl", "repositories"])
def test_source_without_documents(tmp_path, kind):
    with pytest.raises(UserError, match=f"the {kind} source has no documents"):
        open_source(make(kind, folder=str(tmp_path)))
