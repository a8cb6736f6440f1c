"""Data sets and models of the Hugging Face Hub, in a fake of it, beside their copies on a disk."""

import gzip
import io
import json

import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from fake_hub import fake_hub
from families import CONFIGS, language_model
from pretrained_models import Pretrained, write_byte_tokenizer, write_windows

import meliad_like
from meliad_like.config import read_changes
from meliad_like.conversion.pretrained import convert_from_huggingface
from meliad_like.data.preparation import prepare
from meliad_like.data.token_store import TokenStore
from meliad_like.errors import UserError
from meliad_like.run.opening import config_for_training
from meliad_like.sources.base import open_source
from meliad_like.sources.hub import HuggingFaceSource
from meliad_like.sources.records import ParquetSource
from meliad_like.vocabularies.base import BytesVocabularyConfig

BYTES = BytesVocabularyConfig()


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """One for all tests: fsspec remembers the address of the first."""
    with pytest.MonkeyPatch.context() as monkeypatch, fake_hub(monkeypatch, tmp_path_factory.mktemp("cache")) as hub:
        yield hub


def parquet(*texts):
    content = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), content, row_group_size=3)
    return content.getvalue()


def lines(*texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def card(*configs):
    return f"---\nlicense: mit\nconfigs: {json.dumps(configs)}\n---\n# A data set\n".encode()


def config(split_patterns, name="default", **fields):
    return {"config_name": name, "data_files": [{"split": s, "path": p} for s, p in split_patterns.items()], **fields}


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return str(folder)


def documents(**settings):
    """(split, name) -> text of all documents."""
    read = [reference() for reference in open_source(HuggingFaceSource(**settings)).references()]
    return {(document.split, document.name): document.text for document in read}


BOOKS = {
    f"data/{split}-0000{i}-of-00002.parquet": parquet(*(f"{split} {i} {j}\n" * 9 for j in range(7)))
    for split in ("train", "validation", "test")
    for i in range(2)
}


def test_a_store_of_a_data_set_is_that_of_its_copy(hub, tmp_path):
    """And of its parquet files alone: the same tokens. The commit is in the fingerprint."""
    files = {"README.md": b"# Books", ".gitattributes": b"", **BOOKS}
    first = hub.put("datasets/org/books", files)
    online = prepare(HuggingFaceSource(dataset="org/books"), BYTES, tmp_path / "online", 1)
    copy = write(tmp_path / "copy", files)
    offline = prepare(HuggingFaceSource(folder=copy), BYTES, tmp_path / "offline", 1)
    plain = prepare(ParquetSource(folder=copy), BYTES, tmp_path / "plain", 1)
    assert online.info.splits == offline.info.splits == plain.info.splits
    assert online.info.splits["train"].documents == 14
    for split in ("train", "validation", "test"):
        tokens = {(tmp_path / name / split / "tokens.bin").read_bytes() for name in ("online", "offline", "plain")}
        assert len(tokens) == 1
    assert online.info.folder == f"hf://datasets/org/books@{first}"
    # The Hub knows the contents' checksums: a file is read for its rows and their number alone.
    assert max(hub.downloads[name] for name in BOOKS) <= 3
    second = hub.put("datasets/org/books", files | {"README.md": b"# Other books"})
    assert second != first
    with pytest.raises(UserError, match="online belongs to another config: source is"):
        prepare(HuggingFaceSource(dataset="org/books"), BYTES, tmp_path / "online", 1)
    # With another file it is the next version of the store.
    hub.put("datasets/org/books", files | {"data/train-more.parquet": parquet("more")})
    grown = prepare(HuggingFaceSource(dataset="org/books"), BYTES, tmp_path / "online", 1)
    assert grown.version == 2 and [*grown.split("train").names][14:] == ["data/train-more.parquet:1"]
    assert grown.read_by([online.fingerprint]).info == online.info
    pinned = HuggingFaceSource(dataset="org/books", revision=first)
    assert prepare(pinned, BYTES, tmp_path / "pinned", 1).info.source != online.info.source  # another setting
    # A training needs no Hub.
    TokenStore(tmp_path / "online").check_settings(HuggingFaceSource(dataset="org/books"), BYTES)


def test_splits_and_configurations_of_the_card(tmp_path):
    files = {
        "README.md": card(
            config({"train": "a/*.jsonl", "dev": ["b.json", "c/*.jsonl"]}),
            config({"test_sft": "./d.jsonl.gz"}, "other"),
        ),
        "a/1.jsonl": lines("a 1"),
        "a/deep/2.jsonl": lines("not matched"),
        "b.json": lines("b"),
        "c/y.jsonl": lines("c"),
        "d.jsonl.gz": gzip.compress(lines("d")),
        "dataset_infos.json": b"{}",
    }
    folder = write(tmp_path / "set", files)
    expected = {("train", "a/1.jsonl:1"): "a 1", ("validation", "b.json:1"): "b"}
    assert documents(folder=folder) == expected | {("validation", "c/y.jsonl:1"): "c"}
    assert documents(folder=folder, configuration="other") == {("test", "d.jsonl.gz:1"): "d"}
    names = r"README.md has the configurations 'default', 'other': choose HuggingFaceSource.configuration"
    with pytest.raises(UserError, match=names):
        documents(folder=folder, configuration="third")
    write(tmp_path / "set", {"README.md": card(config({"train": "b.json"}, "x"), config({"train": "b.json"}, "y"))})
    with pytest.raises(UserError, match="the configurations 'x', 'y'"):
        documents(folder=folder)
    write(tmp_path / "set", {"README.md": card(config({}, "x"), config({"test": "b.json"}, "y", default=True))})
    assert documents(folder=folder) == {("test", "b.json:1"): "b"}
    assert set(documents(folder=folder, splits_by_name=False, test_share=0.0, validation_share=0.0)) == {
        ("train", "b.json:1")
    }


def test_folders_of_configurations_and_files_in_two_forms(tmp_path):
    """Neither two configurations nor two copies of the documents are read as one data set."""
    files = {f"{name}/{split}.jsonl": lines(f"{name} {split}") for name in ("en", "de") for split in ("train", "test")}
    configs = [{"config_name": name, "data_dir": name} for name in ("en", "de")]
    folder = write(tmp_path / "set", files | {"README.md": card(*configs)})
    expected = {("train", "de/train.jsonl:1"): "de train", ("test", "de/test.jsonl:1"): "de test"}
    assert documents(folder=folder, configuration="de") == expected
    (tmp_path / "set" / "README.md").unlink()
    assert documents(folder=folder, configuration="de") == expected
    write(tmp_path / "set", {"de/train.parquet": parquet("de train")})
    with pytest.raises(UserError, match="has parquet files and JSON lines, perhaps of the same documents: "):
        documents(folder=folder, configuration="de")
    assert documents(folder=folder, configuration="de", suffixes=(".jsonl",)) == expected


def test_a_card_with_train_alone_is_dealt(tmp_path):
    files = {"README.md": card(config({"train": "data/*"})), "data/all.jsonl": lines(*(f"text {i}" for i in range(99)))}
    folder = write(tmp_path / "set", files)
    store = prepare(HuggingFaceSource(folder=folder, test_share=0.2), BYTES, tmp_path / "store", 1)
    assert all(totals.documents for totals in store.info.splits.values())


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({"unsupervised": "a.jsonl"}, "has a split 'unsupervised', none of train, validation and test: leave"),
        ({"train": "*.jsonl", "test": "a.jsonl"}, "names a.jsonl for train and for test"),
        ({"train": "*.csv"}, r"names files '\*.csv', of which none .*: perhaps HuggingFaceSource.revision = 'refs/con"),
        ({"train": 3}, "README.md is damaged, or no card of a data set"),
    ],
)
def test_cards_that_can_not_be_used(tmp_path, patterns, message):
    folder = write(tmp_path, {"README.md": card(config(patterns)), "a.jsonl": lines("a"), "b.jsonl": lines("b")})
    with pytest.raises(UserError, match=message):
        documents(folder=folder)
    if "unsupervised" in patterns:
        write(tmp_path, {"README.md": card(config(patterns | {"train": "b.jsonl"}))})
        assert documents(folder=folder, exclude=("a.jsonl",)) == {("train", "b.jsonl:1"): "b"}


def test_converted_parquet_files(hub):
    """The Hub converts only the first 5 GB of large data sets: they would be a silently smaller data set."""
    converted = {f"default/{split}/0000.parquet": parquet(split) for split in ("train", "test")}
    hub.put("datasets/org/scripted", {"scripted.py": b"raise SystemExit"})
    hub.put("datasets/org/scripted", converted | {"other/train/0000.parquet": parquet("x")}, "refs/convert/parquet")
    with pytest.raises(UserError, match=r"@\w+ has no files of the configuration 'default' .*'refs/convert/parquet'"):
        documents(dataset="org/scripted")
    found = documents(dataset="org/scripted", revision="refs/convert/parquet")
    assert {split: text for (split, _), text in found.items()} == {"train": "train", "test": "test"}
    cut = {"default/partial-train/0000.parquet": parquet("x"), "default/test/0000.parquet": parquet("y")}
    hub.put("datasets/org/cut", cut, "refs/convert/parquet")
    with pytest.raises(UserError, match="partial-train/0000.parquet is of the first 5 GB of the data set alone"):
        documents(dataset="org/cut", revision="refs/convert/parquet")


def test_a_data_set_that_is_not_there(hub):
    for settings in {"dataset": "org/none"}, {"dataset": "org/books", "revision": "none"}:
        with pytest.raises(
            UserError, match="^the data set 'org/\\w+' of the Hub, revision '\\w+', can't be read: [^\\n]*$"
        ):
            documents(**settings)
    with pytest.raises(UserError, match="name a data set of the Hub, HuggingFaceSource.dataset = 'ORG/NAME'"):
        documents()


def test_a_folder_of_the_hub(hub):
    """By the way of all other sources."""
    hub.put("datasets/org/plain", BOOKS)
    opened = open_source(ParquetSource(folder="hf://datasets/org/plain@main/data", exclude=("*-00001-*",)))
    splits = [reference().split for reference in opened.references()]
    assert splits == ["test"] * 7 + ["train"] * 7 + ["validation"] * 7


def test_a_model_of_the_hub(hub, tmp_path):
    """Of another revision, too. Nothing is downloaded twice, and nothing that is not read."""
    opened = language_model(CONFIGS["gpt2"]).opened
    files = {}
    for name, seed in (("main", 0), ("v2", 1)):
        params = opened.model.init(jax.random.key(seed))
        (tmp_path / name).mkdir()
        write_windows(Pretrained(opened.run.model, 257, params), 256, tmp_path / name)
        write_byte_tokenizer(tmp_path / name)
        files = {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        hub.put("models/org/tiny", files | {"pytorch_model.bin": b"x", "consolidated.safetensors": b"x"}, name)
    for name, place in (("main", "hf://org/tiny"), ("v2", "hf://org/tiny@v2"), ("v2", "hf://org/tiny@v2")):
        there, here = (meliad_like.load(folder).score("a text") for folder in (place, tmp_path / name))
        np.testing.assert_array_equal(there.log_probabilities, here.log_probabilities)
    assert hub.downloads["model.safetensors"] == 2 and hub.downloads["tokenizer.json"] == 1  # the same one in both
    assert not hub.downloads["pytorch_model.bin"] and not hub.downloads["consolidated.safetensors"]
    run = config_for_training("hf://org/tiny@v2", read_changes((), ()))
    vocabulary = meliad_like.load(tmp_path / "v2").vocabulary
    assert run.model == opened.run.model and run.vocabulary.make().fingerprint == vocabulary.fingerprint
    convert_from_huggingface("hf://org/tiny", (), (), tmp_path / "ours")
    ours, theirs = (meliad_like.load(tmp_path / name).score("a text") for name in ("ours", "main"))
    np.testing.assert_array_equal(ours.log_probabilities, theirs.log_probabilities)
    hub.put("models/org/pickled", {"config.json": b"{}", "pytorch_model.bin": b"x"})
    message = r"^hf://org/pickled has no model in a format that can be read .huggingface: model\*.safetensors"
    with pytest.raises(UserError, match=message):
        meliad_like.load("hf://org/pickled")
    for place in "hf://org/none", "hf://org/tiny@v3", "hf://org/tiny/too/deep":
        with pytest.raises(UserError, match=f"^the model {place} can't be downloaded: [^\\n]*$"):
            meliad_like.load(place)
