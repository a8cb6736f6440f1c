"""Every shipped gin file, alone and combined."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from decoders import recurrent_layers

from meliad_like import config
from meliad_like.config import construction
from meliad_like.config.bindings import Rank, collect, shipped_files
from meliad_like.history.config import HistorySettings
from meliad_like.mesh import MeshConfig, make_mesh, parameter_shardings
from meliad_like.mixers.external_memory import ExternalMemory
from meliad_like.mixers.recurrent_states import RecurrentStates, StateReader
from meliad_like.models.model import Model

FILES = shipped_files()
SIZES = [name for name in FILES if name.startswith("size/")]
TASKS = [name for name in FILES if name.startswith("task/")]
RECURRENT_ROWS = [name for name in FILES if name.startswith(("block_recurrent/fixed_", "block_recurrent/lstm_"))]
SLIDE_ROWS = ["block_recurrent/slide_12l.gin", "block_recurrent/slide_13l.gin"]

# Parameters with a vocabulary of 32,000. Slide, fixed:skip and lstm:dual are what the reference's models have; without
# the embedding Slide of the default size has the paper's 151M.
ROW_PARAMETERS = {
    "xl_512": 183_791_712,
    "xl_1024": 183_791_712,
    "xl_2048": 183_791_712,
    "slide_12l": 183_791_712,
    "slide_13l": 196_376_936,
    "fixed_skip": 193_230_968,
    "fixed_single": 203_716_728,
    "fixed_dual": 201_621_624,
    "lstm_skip": 197_426_296,
    "lstm_single": 212_106_360,
    "lstm_dual": 214_206_584,
    # Eleven more layers read states: a query, a scale and an output as wide again.
    "feedback_lstm_single": 212_106_360 + 11 * (2 * 1024**2 + 8),
    "feedback_fixed_skip": 193_230_968 + 11 * (2 * 1024**2 + 8),
    # A gate for each head instead of a position bias.
    "memorizing_64k": 183_791_712 - 8 * 32 + 8,
    "memorizing_64k_bucketed": 183_791_712 - 8 * 32 + 8,
}
# Without the embedding: Slide and fixed:skip.
SIZE_PARAMETERS = {
    "tiny": (24_998, 34_284),
    "quickstart": (787_848, 935_566),
    "laptop": (3_148_560, 3_738_908),
    "small_37m": (37_764_704, 40_387_192),
    "small_75m": (75_513_440, 80_233_080),
    "medium_150m": (151_023_712, 160_462_968),
    "medium_300m": (302_021_824, 319_849_712),
    "large_600m": (604_037_312, 639_693_040),
    "large_1200m": (1_208_023_424, 1_277_233_632),
    "tall_600m": (604_042_624, 639_698_400),
    "tall_1200m": (1_208_072_576, 1_279_384_032),
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


def beside(name):
    """What a shipped file needs to say anything: options of recurrent states need a row that has them."""
    of_states = name.startswith(("option/states_", "option/clear_states", "option/sharp_states"))
    return ["block_recurrent/fixed_skip.gin"] if of_states else []


def parse_whole(*names):
    """The configs that shipped files describe, those of history's own commands among them."""
    return construction.build(collect(names, []), config.RunConfig, HistorySettings)


@pytest.mark.parametrize("name", FILES)
def test_a_shipped_file_is_a_run_that_can_be_saved(name):
    run, _ = parse_whole(name, *beside(name))
    assert config.from_json(config.to_json(run)) == run


@pytest.mark.parametrize("name", FILES)
def test_a_shipped_file_changes_something_or_says_what_base_says(name):
    same_as_base = {
        "base.gin",
        "block_recurrent/slide_12l.gin",
        "block_recurrent/table3/slide_window_512.gin",
        "option/inverse_square_root.gin",
        "option/states_512.gin",
        "option/window_512.gin",
        "size/medium_150m.gin",
    }
    assert (parse_whole(name, *beside(name)) != parse_whole(*beside(name))) == (name not in same_as_base)


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
    recurrent = (states.gate, states.cell) if (states := model.mixer(RecurrentStates)) else ()
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


@pytest.mark.parametrize("row", ROW_PARAMETERS)
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
    feedback = {row for row, model in models.items() if model.mixer(StateReader) == StateReader()}
    assert feedback == {row for row in models if "feedback" in row}
    memories = {row: memory for row, model in models.items() if (memory := model.mixer(ExternalMemory))}
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


@pytest.mark.parametrize("row", ROW_PARAMETERS)
def test_parameters_of_a_row(row):
    run = config.parse([f"block_recurrent/{row}.gin"])
    assert Model(run.model, 32_000).num_parameters == ROW_PARAMETERS[row]


@pytest.mark.parametrize("size", [name.removeprefix("size/").removesuffix(".gin") for name in SIZES])
def test_parameters_of_a_size(size):
    rows = ("slide_12l", "fixed_skip")
    models = [config.parse([f"size/{size}.gin", f"block_recurrent/{row}.gin"]).model for row in rows]
    without_embedding = tuple(Model(m, 256).num_parameters - 256 * m.model_width for m in models)
    assert without_embedding == SIZE_PARAMETERS[size]


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
        ("size/tall_600m.gin", "block_recurrent/slide_13l.gin", "option/window_1024.gin", "option/bfloat16.gin"),
        ("size/small_37m.gin", "block_recurrent/xl_512.gin", "option/extra_layers.gin", "task/pg19_tokens.gin"),
    ],
)
def test_the_order_of_files_never_matters(names):
    runs = {config.parse(order) for order in itertools.permutations(names)}
    assert len(runs) == 1
