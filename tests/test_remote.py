"""Working folders and token stores on gs://, in a fake bucket that can fail."""

import json
import os
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tiny_run
from checkpoint_states import abstract, assert_same_bits, make_state, save_all
from families import CONFIGS, language_model
from gcsfs.retry import HttpError
from pretrained_models import Pretrained, write_byte_tokenizer, write_windows
from tiny_run import parse, read_metadata, train

import meliad_like
from meliad_like import command_line, remote
from meliad_like.config import read_changes
from meliad_like.conversion.parameters import write_checkpoint
from meliad_like.data import token_store
from meliad_like.data.token_store import TokenStore
from meliad_like.errors import UserError
from meliad_like.models.model import Model
from meliad_like.remote import any_path
from meliad_like.run.opening import config_for_training, open_checkpoint
from meliad_like.training import metrics
from meliad_like.training.checkpoints import Checkpoints
from meliad_like.training.processes import Ownership


def names(bucket, prefix):
    return [name for name in bucket.objects if name.startswith(prefix)]


def test_checkpoints_are_kept_and_restored(bucket):
    with Checkpoints("gs://bucket/run", keep_last=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, make_state(step), {"step": step})
        checkpoints.wait()
        restored, metadata = checkpoints.restore(abstract(make_state()))
    assert_same_bits(restored, make_state(3))
    assert metadata == {"step": 3}
    with Checkpoints("gs://bucket/run", read_only=True) as checkpoints:
        assert checkpoints.steps() == [2, 3]
    assert not names(bucket, "run/1/")


def test_a_flipped_bit_is_noticed(bucket):
    save_all("gs://bucket/run", [1, 2])
    largest = max(names(bucket, "run/2/params"), key=lambda name: len(bucket.objects[name][0]))
    content = bytearray(bucket.objects[largest][0])
    content[len(content) // 2] ^= 1
    bucket.put(largest, bytes(content))
    with Checkpoints("gs://bucket/run") as checkpoints:
        restored, _ = checkpoints.restore(abstract(make_state()))
        assert_same_bits(restored, make_state(1))
        checkpoints.save(2, make_state(2), {"step": "again"})
    assert read_metadata("gs://bucket/run") == {"step": "again"}
    assert names(bucket, "run/damaged-2/params")


def test_a_checkpoint_that_was_not_finished_does_not_count(bucket):
    """A bucket can not rename a folder: what is half written has its final name, and lacks the file that ends it."""
    save_all("gs://bucket/run", [1, 2])
    for name in names(bucket, "run/2/"):
        if "commit_success" in name or "manifest" in name:
            del bucket.objects[name]
    assert read_metadata("gs://bucket/run") == {"step": 1}
    bucket.put("run/vocabulary/vocabulary.json", b"of the run")
    save_all("gs://bucket/run", [3])
    assert read_metadata("gs://bucket/run") == {"step": 3}
    assert not names(bucket, "run/2/") and names(bucket, "run/vocabulary/")


@pytest.fixture(scope="module")
def bindings(tmp_path_factory):
    """The bindings of a short run on a store in the bucket, where `run` writes it."""
    return [
        *tiny_run.make_bindings(tmp_path_factory.mktemp("documents")),
        "TrainingConfig.num_steps = 6",
        "TrainingConfig.checkpoint_every = 2",
        "TrainingConfig.checkpoints_kept = 2",
        "MeshConfig.data = 1",
    ]


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def upload(bucket, folder, prefix):
    for path in Path(folder).rglob("*"):
        if path.is_file():
            bucket.put(f"{prefix}/{path.relative_to(folder).as_posix()}", path.read_bytes())


@pytest.mark.thorough
def test_a_run_in_a_bucket_is_the_run_on_a_disk(bindings, bucket, cache, tmp_path, monkeypatch, capsys):
    """Its documents, checkpoints and logs are in the bucket; an interrupted run resumes."""
    evaluating = (
        "TrainingConfig.evaluate_every = 6",
        "TrainingConfig.sample_every = 6",
        "TrainingConfig.sample_tokens = 2",
    )
    assert train(parse(bindings, *evaluating), tmp_path / "disk") == 0
    local = parse(bindings).data.store
    upload(bucket, local, "store")
    there = (*evaluating, "ReaderConfig.store = 'gs://bucket/store'")
    monkeypatch.setattr(metrics, "UPLOAD_SECONDS", 0.0)
    assert train(parse(bindings, *there, "TrainingConfig.num_steps = 4"), "gs://bucket/run", profile_steps=(2, 3)) == 0
    bucket.put("run/metrics.jsonl", bucket.objects["run/metrics.jsonl"][0] + b'{"step": 5, "ki')
    assert train(parse(bindings, *there), "gs://bucket/run") == 0
    assert "from step 4 to 6" in capsys.readouterr().out

    lines = [json.loads(line) for line in bucket.objects["run/metrics.jsonl"][0].splitlines()]
    expected = [json.loads(line) for line in (tmp_path / "disk" / "metrics.jsonl").read_text().splitlines()]
    figures = [[(line["step"], line["kind"], line.get("loss")) for line in each] for each in (lines, expected)]
    # The first half also evaluated after its last step.
    assert [each for each in figures[0] if each[:2] != (4, "validation")] == figures[1]
    on_disk, in_bucket = (open_checkpoint(folder) for folder in (tmp_path / "disk", "gs://bucket/run"))
    assert on_disk.step == in_bucket.step == 6 and on_disk.vocabulary.fingerprint == in_bucket.vocabulary.fingerprint
    tiny_run.assert_same_bits(in_bucket.params, on_disk.params)
    assert names(bucket, "run/samples/step_6.txt") and names(bucket, "run/config.gin")
    assert len([name for name in names(bucket, "run/") if "tfevents" in name]) == 2
    assert [name for name in names(bucket, "run/profile/") if name.endswith(".xplane.pb")]
    # Of the splits, those that were read.
    (copied,) = (cache / "meliad_like" / "stores").iterdir()
    assert sorted(path.name for path in copied.iterdir() if path.is_dir()) == ["train", "validation"]


def test_a_model_and_its_states_in_a_bucket(bucket):
    opened = language_model(CONFIGS["lstm:dual"]).opened
    write_checkpoint("gs://bucket/run/checkpoints", opened.params, opened.run, opened.vocabulary)
    lm = meliad_like.load("gs://bucket/run")
    book = lm.read("a book")
    book.save("gs://bucket/book.npz")
    assert set(lm.resume("gs://bucket/book.npz").difference(book).values()) == {0.0}
    with pytest.raises(UserError, match="cannot read gs://bucket/none: "):
        lm.resume("gs://bucket/none")
    bucket.refuse = lambda method, name: 403 if "book" in name else None
    with pytest.raises(UserError, match="cannot write the carry to gs://bucket/book.npz: .*"):
        book.save("gs://bucket/book.npz")


def test_a_folder_of_transformers_in_a_bucket(bucket, tmp_path):
    config = CONFIGS["gpt2"]
    write_windows(Pretrained(config, 257, Model(config, 257).init(jax.random.key(0))), 256, tmp_path)
    write_byte_tokenizer(tmp_path)
    upload(bucket, tmp_path, "gpt2")
    there, here = (meliad_like.load(place) for place in ("gs://bucket/gpt2", tmp_path))
    np.testing.assert_array_equal(*(lm.score("a text").log_probabilities for lm in (there, here)))
    vocabulary = config_for_training("gs://bucket/gpt2", read_changes()).vocabulary
    assert vocabulary.model_file == "gs://bucket/gpt2" and vocabulary.make().fingerprint == here.vocabulary.fingerprint


def test_a_store_is_copied_once_and_again_when_it_is_another(bindings, bucket, cache, capsys):
    local = TokenStore(parse(bindings).data.store)
    upload(bucket, local.folder, "store")
    train_split = TokenStore("gs://bucket/store").split("train")
    np.testing.assert_array_equal(train_split.tokens(3, 0, 20), local.split("train").tokens(3, 0, 20))
    assert TokenStore("gs://bucket/store").vocabulary.fingerprint == local.vocabulary.fingerprint
    assert (
        capsys.readouterr().err
        == f"copying gs://bucket/store/train to {cache}/meliad_like/stores/{local.fingerprint}/train\n"
    )
    TokenStore("gs://bucket/store").split("train")
    assert not capsys.readouterr().err
    tokens = cache / "meliad_like" / "stores" / local.fingerprint / "train" / "tokens.bin"
    os.truncate(tokens, 10)
    with pytest.raises(UserError, match=re.escape(f"{tokens} has 10 bytes and should have")):
        TokenStore("gs://bucket/store").split("train")


def test_a_copy_that_is_cut_off_is_made_anew(bindings, bucket, cache, monkeypatch):
    local = TokenStore(parse(bindings).data.store)
    upload(bucket, local.folder, "store")
    store = TokenStore("gs://bucket/store")

    def refuse(method, name):
        return 403 if name.endswith("tokens.bin") else None

    bucket.refuse = refuse
    with pytest.raises(UserError, match=r"gs://bucket/store/train can't be copied to .*Forbidden.*tries it again"):
        store.split("train")
    bucket.refuse = lambda method, name: None
    assert list(store.split("train").names) == list(local.split("train").names)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(token_store, "copy_folder", full)
    with pytest.raises(UserError, match=r"the disk is full: no room for .*validation"):
        store.split("validation")


def test_a_bucket_that_refuses_to_be_written_to(bindings, bucket, tmp_path):
    bucket.refuse = lambda method, name: 403 if method == "POST" else None
    with pytest.raises(UserError, match=r"gs://bucket/run can't be written to: .*Forbidden"):
        train(parse(bindings), "gs://bucket/run")


# orbax's thread closes its event loop at the first array that can't be written, and tensorstore, which has others to
# write, says in that loop that they are done: Python reports an exception that it ignores.
@pytest.mark.filterwarnings("ignore:(?s)Exception ignored in. None.*Event loop is closed")
@pytest.mark.thorough
def test_a_bucket_that_fails_under_a_run(bindings, bucket):
    """Earlier checkpoints are still there, and the same command resumes."""
    run = parse(bindings)
    bucket.refuse = lambda method, name: 403 if method == "POST" and "checkpoints/4" in name else None
    with pytest.raises(UserError, match=r"checkpoint gs://bucket/run/checkpoints/4 could not be written"):
        train(run, "gs://bucket/run")
    bucket.refuse = lambda method, name: None
    assert read_metadata("gs://bucket/run/checkpoints")["step"] == 2
    assert train(run, "gs://bucket/run") == 0
    assert read_metadata("gs://bucket/run/checkpoints")["step"] == 6


@pytest.fixture
def out_of_order(bucket, monkeypatch):
    """Chooses names that the bucket answers with 503 to: an error of gcsfs that is not an OSError."""
    # It waits between its tries.
    monkeypatch.setattr("gcsfs.retry.min", lambda *_: 0, raising=False)

    def choose(*endings):
        bucket.refuse = lambda method, name: 503 if name.endswith(endings) else None

    return choose


def test_metrics_that_can_not_be_copied_end_nothing_but_a_checkpoint(bucket, out_of_order, monkeypatch, capsys):
    monkeypatch.setattr(metrics, "UPLOAD_SECONDS", 0.0)
    why = "the metrics can't be copied to gs://bucket/run: refused by the test, 503; "
    with (
        pytest.raises(RuntimeError, match="of the run itself"),
        metrics.MetricsWriter("gs://bucket/run", 0, 3) as writer,
    ):
        out_of_order("metrics.jsonl")
        writer.write(1, {"loss": 1.0})
        assert f"warning: {why}this is tried again\n" in capsys.readouterr().out
        with pytest.raises(UserError, match=f"^{why}the same command resumes from the last checkpoint$"):
            writer.keep()
        out_of_order("nothing")
        writer.write(2, {"loss": 1.0})
        assert len(bucket.objects["run/metrics.jsonl"][0].splitlines()) == 2
        out_of_order("metrics.jsonl")
        raise RuntimeError("of the run itself")
    assert f"warning: {why}what was logged since the last copy is lost\n" in capsys.readouterr().out


def test_a_bucket_that_is_out_of_order(bucket, out_of_order):
    with Ownership("gs://bucket/run") as first:
        out_of_order(".lock", "manifest.json")
        with pytest.raises(
            UserError, match=r"the same command resumes: gs://bucket/run/\.lock can't be read: refused by the test, 503"
        ):
            first.check()
        unwritable = "gs://bucket/run can't be written to: refused by the test, 503"
        with pytest.raises(UserError, match=unwritable), Ownership("gs://bucket/run"):
            pass
    with Checkpoints("gs://bucket/run") as checkpoints:
        checkpoints.save(1, make_state(1), {})
        with pytest.raises(UserError, match=r"checkpoint gs://bucket/run/1 could not be written \(refused by the tes"):
            checkpoints.wait()


def test_a_bucket_that_is_out_of_order_anywhere_else_is_one_line(monkeypatch, capsys):
    def main():
        raise HttpError({"code": 503, "message": "no\nanswer"})

    monkeypatch.setattr(command_line.app, "run", lambda report, flags_parser: sys.exit(report(["train"])))
    with pytest.raises(SystemExit, match="2"):
        command_line.Command(None).run(main)
    why = "the object store failed: no answer, 503"
    assert capsys.readouterr().err == f"error: {why}; the same command tries again\n"


def test_the_later_of_two_trainings_in_a_bucket_wins(bucket):
    with Ownership("gs://bucket/run") as first:
        first.check()
        with Ownership("gs://bucket/run") as second:
            second.check()
            with pytest.raises(UserError, match=r"another training has taken gs://bucket/run: process \d+ on .*; this"):
                first.check()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("s4://x/y", "s4://x/y: s4:// is not supported here: use a local path or gs:// or s3:// or az:// or hf://"),
        ("s3://x/y", "s3://x/y needs a package that is not installed: pip install s3fs"),
    ],
)
def test_no_way_to_an_object_store(path, message, monkeypatch):
    monkeypatch.setattr(remote.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=re.escape(message)):
        any_path(path)
    with pytest.raises(UserError, match=re.escape(message)):
        TokenStore(path)


def test_checkpoints_are_nowhere_but_on_disks_and_gs(bindings):
    with pytest.raises(UserError, match=re.escape("s3://x: s3:// is not supported here: use a local path or gs://")):
        train(parse(bindings), "s3://x")
