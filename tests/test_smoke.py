"""Any run made small, and the smoke test of a run: trained, killed, resumed, evaluated."""

import dataclasses
import re

import forked
import pytest
from decoders import mixer_of
from shipped import NAMES, needs
from tiny_run import environment

from meliad_like import config
from meliad_like.config.run import stages_of
from meliad_like.errors import UserError
from meliad_like.mixers.recurrent_states import RecurrentStates
from meliad_like.models.model import Model
from meliad_like.optimization.optimizers import trained_parameters
from meliad_like.planning.shrinking import shrink
from meliad_like.planning.smoke import copy_documents, train_until_killed
from meliad_like.registry import configs_in
from meliad_like.sources.files import TextSource

SIZES = [name for name in NAMES if name.startswith("size/")]
# A row of each table of the papers, and the training of the paper whose tables have none.
ROWS = {
    "table1": ["block_recurrent/fixed_skip.gin"],
    "table1_memory": ["block_recurrent/memorizing_64k.gin"],
    "table3": ["block_recurrent/table3/states_1024"],
    "table4": ["block_recurrent/table4/recurrent_1300m"],
    "table5": ["block_recurrent/table5/sentencepiece_32k"],
    "mixers": ["mixer/gated_delta_rule.gin"],
    "shortformer": ["shortformer/shortformer.gin", "task/wikitext103.gin"],
    "melodi": ["melodi/table/s128_l64"],
    "memory_map": ["memory_map/table/fixed_skip_first"],
    "mixture": ["size/tiny.gin", "task/books_and_standard_library.gin"],
    "recurrence": ["pretrained/gpt2_small.gin", "recurrent_pretrained/tables/recurrent_300_30"],
    "ancient_history": ["ancient_history/train_recent.gin"],
}


def others(name):
    """What a file needs in addition to be the config of a training."""
    return ["pretrained/gpt2_small.gin"] if name.startswith("recurrent_pretrained/") else needs(name)


def check_small(*names):
    run = config.parse(names)
    small = shrink(run)
    model, large = small.model, run.model
    assert model.num_layers <= 3 and model.model_width <= 144
    assert 16 <= model.window_length <= large.window_length
    assert small.data.num_lanes % run.training.gradient_accumulation == 0
    assert len(stages_of(small)) == len(stages_of(run))
    kinds = [[type(part) for part in configs_in(each)] for each in (model, large)]
    assert kinds[0] == kinds[1]
    assert config.from_json(config.to_json(small)) == small


@pytest.mark.parametrize("names", [*([size, "block_recurrent/fixed_skip.gin"] for size in SIZES), *ROWS.values()])
def test_every_size_and_rows_of_all_tables_can_be_made_small(names):
    check_small(*names)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [n for n in NAMES if not n.startswith("ancient_history/") or "/train_" in n])
def test_every_file_can_be_made_small(name):
    check_small(name, *others(name))


def test_shrinking_keeps_ratios_and_shares():
    run = config.parse(["size/tall_1200m.gin", "block_recurrent/fixed_skip.gin", "task/pg19_tokens.gin"])
    small = shrink(run)
    assert (small.model.num_layers, small.model.model_width, small.model.num_heads) == (3, 32, 2)
    assert (small.model.window_length, small.data.segment_length) == (16, 32)
    # Layers 10 and 20 of 24 are the second and the third of 3.
    assert small.model.layers_with(RecurrentStates) == [1, 2]
    assert mixer_of(small.model, RecurrentStates) == RecurrentStates(num_states=16)
    assert small.vocabulary == dataclasses.replace(run.vocabulary, size=512)
    assert shrink(run, keep_vocabulary=True).vocabulary == run.vocabulary
    staged = config.parse(["shortformer/shortformer.gin"])
    assert [stage.last_step for stage in stages_of(shrink(staged))] == [20, 40]
    assert shrink(staged, keep_vocabulary=True).model.cutoffs == staged.model.cutoffs


def test_the_layers_that_are_trained_are_those_of_the_smaller_model():
    patterns = "layers/20/mixers/*", "layers/1?/feedforward/*", "layers/*/norm/*", "embedding"
    run = config.parse(["size/tall_1200m.gin"], [f"OptimizerConfig.trained = {patterns}"])
    small = shrink(run)
    names = "layers/2/mixers/*", "layers/1/feedforward/*", "layers/2/feedforward/*", "layers/*/norm/*", "embedding"
    assert small.model.num_layers == 3 and small.optimizer.trained == names
    trained_parameters(small.optimizer, Model(small.model, 512).kinds, {})


def test_the_beginnings_of_the_first_documents_are_copied(tmp_path, monkeypatch):
    monkeypatch.setattr("meliad_like.planning.smoke.MOST_CHARACTERS", 7)
    folder = tmp_path / "books" / "train"
    folder.mkdir(parents=True)
    for i in range(20):
        (folder / f"{i:02}.txt").write_bytes(b"book\r\n%02d more" % i)
    copy_documents(TextSource(folder=str(tmp_path / "books")), tmp_path / "few")
    copied = {split: sorted((tmp_path / "few" / split).iterdir()) for split in ("train", "validation", "test")}
    assert {split: len(paths) for split, paths in copied.items()} == {"train": 12, "validation": 2, "test": 2}
    assert copied["train"][3].read_bytes() == b"book\r\n1" and copied["test"][1].read_bytes() == b"book\r\n0"
    # Each store of a mixture has its own.
    monkeypatch.undo()
    copy_documents(TextSource(folder=str(tmp_path / "books")), tmp_path / "odd", tmp_path / "even")
    odd, even = ({path.read_bytes() for path in (tmp_path / name).rglob("*.txt")} for name in ("odd", "even"))
    assert not odd & even and len(odd) == len(even) == 10
    with pytest.raises(UserError, match="there is no folder of documents at"):
        copy_documents(TextSource(folder=str(tmp_path / "none")), tmp_path / "nothing")


@pytest.mark.thorough
def test_a_training_that_fails_is_one_line(tmp_path):
    (tmp_path / "smoke.gin").write_text(f"ReaderConfig.store = '{tmp_path}/none'")
    with pytest.raises(UserError, match=r"the training ended with status 2: there is no token store at .*none"):
        train_until_killed(tmp_path / "smoke.gin", tmp_path / "run")


def smoke(*words):
    flags = [word if word.startswith("--") else f"--gin_file={word}" for word in words]
    result = forked.run(
        "-m", "meliad_like.train", "--smoke", *flags, environment=environment(num_devices=1), timeout=600
    )
    assert result.returncode == 0, result.stderr + result.stdout
    assert re.search(r"== killed by SIGKILL after \d+ s, with step \d0 saved; resuming\n", result.stdout)
    assert re.search(r"== evaluated: \d\.\d+ bits per token on [\d,]+ tokens of test\n", result.stdout)
    assert re.search(r"== everything works at this size: \d+ s\n", result.stdout)
    assert "meliad_like prepare --gin_file=" in result.stdout
    return result.stdout


def test_the_smoke_test_of_a_run(tmp_path):
    kept = tmp_path / "kept"
    text = smoke("size/tiny.gin", "task/books.gin", "--gin_param=DecoderConfig.num_layers = 1", f"--workdir={kept}")
    assert "== the task's documents are not there (there is no folder of documents" in text
    assert (kept / "run" / "checkpoints" / "40").is_dir()
    again = forked.run("-m", "meliad_like.train", "--smoke", f"--workdir={kept}")
    assert (again.returncode, again.stderr) == (2, f"error: --workdir={kept} exists: name a new folder for --smoke\n")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", SIZES)
def test_the_smoke_test_of_every_size(name):
    smoke(name, "task/standard_library.gin", "block_recurrent/fixed_skip.gin")


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", ROWS)
def test_the_smoke_test_of_a_row_of_every_table(row):
    smoke(*ROWS[row])
