"""Every shipped gin file and row of a table, alone and combined."""

import dataclasses
import functools
import itertools
import re

import jax
import numpy as np
import pytest
from decoders import mixer_of, recurrent_layers
from pages import ROOT
from shipped import needs, vocabulary_size

from meliad_like import config
from meliad_like.config import construction
from meliad_like.config.bindings import Rank, collect
from meliad_like.families.pretrained.config import PretrainedConfig
from meliad_like.history.settings import HistorySettings
from meliad_like.mesh import MeshConfig, make_mesh, parameter_shardings
from meliad_like.mixers.external_memory import ExternalMemory
from meliad_like.mixers.recurrent_states import RecurrentStates, StateReader
from meliad_like.models.model import Model

FILES = config.shipped_files()
TABLES = sorted({name.rpartition("/")[0] for name in config.shipped_rows()})
SIZES = [name for name in FILES if name.startswith("size/")]
TASKS = [name for name in FILES if name.startswith("task/")]
RECURRENT_ROWS = [name for name in FILES if name.startswith(("block_recurrent/fixed_", "block_recurrent/lstm_"))]
SLIDE_ROWS = ["block_recurrent/slide_12l.gin", "block_recurrent/slide_13l.gin"]

# Files that say what base.gin says.
SAME_AS_BASE = {
    "base.gin",
    "block_recurrent/slide_12l.gin",
    "option/inverse_square_root.gin",
    "size/medium_150m.gin",
}
# The paper's table 1: segment, window, layers, recurrent layers (counted from 0), gate and cell.
TABLE_1 = {
    "xl_512": (512, 512, 12, set()),
    "xl_1024": (1024, 1024, 12, set()),
    "xl_2048": (2048, 2048, 12, set()),
    "slide_12l": (4096, 512, 12, set()),
    "slide_13l": (4096, 512, 13, set()),
    "lstm_dual": (4096, 512, 12, {9}, "lstm", "dual"),
    "lstm_single": (4096, 512, 12, {9}, "lstm", "single"),
    "lstm_skip": (4096, 512, 12, {9}, "lstm", "skip"),
    "fixed_dual": (4096, 512, 12, {9}, "fixed", "dual"),
    "fixed_single": (4096, 512, 12, {9}, "fixed", "single"),
    "fixed_skip": (4096, 512, 12, {9}, "fixed", "skip"),
    "feedback_lstm_single": (4096, 512, 12, {9}, "lstm", "single"),
    "feedback_fixed_skip": (4096, 512, 12, {9}, "fixed", "skip"),
    "memorizing_64k": (512, 512, 12, set()),
    "memorizing_64k_bucketed": (512, 512, 12, set()),
}
SLIDE, GPT2_SMALL = 183_791_712, 124_439_808
WITHOUT_POSITIONS = SLIDE - 12 * 8 * 32
# Of files that are no rows of tables, with the vocabulary of `vocabulary_size`.
PARAMETERS = {
    "base.gin": SLIDE,
    "needles.gin": 4_490_380,
    "own_documents.gin": 791_874 + 32_000 * 128,
    "quickstart.gin": 5_019_278,
    "quickstart_training.gin": 787_848 + 32_000 * 128,
    "recurrence_study.gin": 2_442_832,
    "option/alibi.gin": WITHOUT_POSITIONS,
    "option/alibi_fixed_bound.gin": WITHOUT_POSITIONS + 12,
    "option/alibi_learned.gin": WITHOUT_POSITIONS + 12 * 2,
    "option/fourier.gin": WITHOUT_POSITIONS + 12 * 8 * 128,
    "option/nn_positions.gin": WITHOUT_POSITIONS + 12 * (8 + 2) * 128,
    "option/no_positions.gin": WITHOUT_POSITIONS,
    "option/orthogonal.gin": WITHOUT_POSITIONS + 12 * 8 * 7,
    "option/rotary.gin": WITHOUT_POSITIONS,
    "option/rotary_pi.gin": WITHOUT_POSITIONS,
    "pretrained/gpt2_small.gin": GPT2_SMALL,
    "pretrained/gpt2_medium.gin": 354_823_168,
    "pretrained/gpt2_large.gin": 774_030_080,
    "pretrained/gpt2_xl.gin": 1_557_611_200,
    "pretrained/smollm2_135m.gin": 134_515_008,
    # 768 -> 200 -> 200 -> 200 -> 768, and a score for each of 12 layers.
    "recurrent_pretrained/quiet_start.gin": GPT2_SMALL + 388_568 + 12,
    "size/tiny.gin": 24_998 + 32_000 * 32,
    "size/quickstart.gin": 787_848 + 32_000 * 128,
    "size/laptop.gin": 3_148_560 + 32_000 * 256,
    "size/small_37m.gin": 54_148_704,
    "size/small_75m.gin": 91_897_440,
    "size/medium_150m.gin": SLIDE,
    "size/medium_300m.gin": 334_789_824,
    "size/large_600m.gin": 669_573_312,
    "size/large_1200m.gin": 1_273_559_424,
    "size/tall_600m.gin": 636_810_624,
    "size/tall_1200m.gin": 1_273_608_576,
}


def parse_whole(*names):
    """The configs that shipped files describe, those of history's own commands among them."""
    return construction.build(collect(names, []), config.RunConfig, HistorySettings)


@functools.cache
def count(model, vocabulary_size):
    if isinstance(model, PretrainedConfig) and (model.window_length, model.overlap) != (1, 0):
        # The windows in which documents are read have no parameters, and most rows differ in them alone.
        return count(dataclasses.replace(model, window_length=1, overlap=0), vocabulary_size)
    return Model(model, vocabulary_size).num_parameters


def test_the_page_explains_every_folder():
    folders = {name.split("/")[0] for name in (*FILES, *config.shipped_rows()) if "/" in name}
    page = (ROOT / "gin" / "README.md").read_text()
    assert set(re.findall(r"^\| `(\w+)/`", page, re.MULTILINE)) == folders


@pytest.mark.parametrize("folder", sorted({name.rpartition("/")[0] for name in FILES}))
def test_the_files_of_a_folder(folder):
    """Each is a run that can be saved, whose bindings are all read."""
    for name in (name for name in FILES if name.rpartition("/")[0] == folder):
        run, _ = configs = parse_whole(name, *needs(name))
        assert config.from_json(config.to_json(run)) == run, name
        assert (configs != parse_whole(*needs(name))) == (name not in SAME_AS_BASE), name


@pytest.mark.parametrize("table", TABLES)
def test_the_rows_of_a_table(table):
    """Each is a run that can be saved, whose bindings are all read, and a model with its number of parameters."""
    counts, expected = {}, {}
    for name, row in config.read_table(table).items():
        run, _ = parse_whole(f"{table}/{name}")
        assert config.from_json(config.to_json(run)) == run, name
        # Of Ancient History Language Models, the user names the model.
        if table != "ancient_history/table1":
            expected[name] = int(row.cells["parameters"])
            counts[name] = count(run.model, int(row.cells.get("vocabulary_size", vocabulary_size(f"{table}/{name}"))))
    assert counts == expected


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_of_a_file(name):
    assert count(parse_whole(name, *needs(name))[0].model, vocabulary_size(name)) == PARAMETERS[name]


def test_every_binding_of_base_is_read():
    bindings = collect([], [])
    read = construction.build(
        {k: dataclasses.replace(b, rank=Rank.FILE) for k, b in bindings.items()}, config.RunConfig
    )
    assert read == (config.parse(),)


@pytest.mark.parametrize("row", TABLE_1)
def test_a_row_alone_is_the_model_of_table_1(row):
    run = config.parse([f"block_recurrent/{row}.gin"])
    model = run.model
    recurrent = (states.gate, states.cell) if (states := mixer_of(model, RecurrentStates)) else ()
    actual = (
        run.data.segment_length,
        model.window_length,
        model.total_layers,
        recurrent_layers(model),
        *recurrent,
    )
    assert actual == TABLE_1[row]
    assert run.data.tokens_per_step == 32 * 4096
    assert run.training.num_steps == 500_000
    assert model.dropout_rate == 0.05


@pytest.mark.parametrize("row", TABLE_1)
def test_a_row_lies_on_any_mesh(row):
    """No parameter has two dimensions along the same axis of the mesh, and all divide."""
    model = Model(config.parse([f"block_recurrent/{row}.gin"]).model, 32_000)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    shardings = parameter_shardings(mesh, model.axes, model.abstract_params)
    sizes = jax.tree.map(lambda s, x: np.prod(s.shard_shape(x.shape)), shardings, model.abstract_params)
    # Cut in four, but for what has one dimension.
    assert sum(jax.tree.leaves(sizes)) < 0.26 * model.num_parameters


def test_feedback_and_memory_of_table_1():
    models = {row: config.parse([f"block_recurrent/{row}.gin"]).model for row in TABLE_1}
    feedback = {row for row, model in models.items() if mixer_of(model, StateReader) == StateReader()}
    assert feedback == {row for row in models if "feedback" in row}
    memories = {row: memory for row, model in models.items() if (memory := mixer_of(model, ExternalMemory))}
    assert memories.keys() == {"memorizing_64k", "memorizing_64k_bucketed"}
    memory = memories["memorizing_64k"]
    assert (models["memorizing_64k"].layers_with(ExternalMemory), memory.num_slots, memory.num_neighbors) == (
        [8],
        65_536,
        128,
    )


def test_every_row_is_in_table_1():
    rows = {name for name in FILES if name.startswith("block_recurrent/") and name.count("/") == 1}
    assert {f"block_recurrent/{row}.gin" for row in TABLE_1} == rows


def test_the_24_layer_models_recur_at_the_papers_layers_10_and_20():
    model = config.parse(["size/tall_1200m.gin", "block_recurrent/fixed_skip.gin"]).model
    assert (model.total_layers, recurrent_layers(model)) == (24, {9, 19})
    assert config.parse(["block_recurrent/slide_13l.gin", "size/tall_1200m.gin"]).model.total_layers == 26


@pytest.mark.parametrize("size", SIZES)
def test_every_size_combines_with_every_row_and_task(size):
    for row in RECURRENT_ROWS + SLIDE_ROWS:
        run = config.parse([row, size])
        assert bool(recurrent_layers(run.model)) == (row in RECURRENT_ROWS)
    for task in TASKS:
        run = config.parse([task, size])
        assert run.model == config.parse([size]).model
        assert run.source == config.parse([task]).source


@pytest.mark.parametrize(
    "names",
    [
        ("size/tiny.gin", "block_recurrent/lstm_dual.gin", "task/standard_library.gin", "option/cosine.gin"),
        ("size/tall_600m.gin", "block_recurrent/slide_13l.gin", "option/remat_dots.gin", "option/bfloat16.gin"),
        ("size/small_37m.gin", "block_recurrent/xl_512.gin", "option/cosine.gin", "task/pg19_tokens.gin"),
    ],
)
def test_the_order_of_files_never_matters(names):
    runs = {config.parse(order) for order in itertools.permutations(names)}
    assert len(runs) == 1
