"""The rows of tables 1, 3, 4 and 5: their gin files at the paper's size, and at other scales."""

import dataclasses
import re

import numpy as np
import pytest
from decoders import mixer_of, recurrent_layers
from pages import ROOT

from meliad_like import config
from meliad_like.errors import UserError
from meliad_like.experiments.tables import SUBJECTS, TABLES
from meliad_like.experiments.tables.ancient_history import TABLE as ANCIENT_HISTORY
from meliad_like.experiments.tables.ancient_history import rows_of
from meliad_like.experiments.tables.block_recurrent import SCALES
from meliad_like.experiments.tables.table import configure
from meliad_like.mixers.base import MIXERS
from meliad_like.mixers.external_memory import ExternalMemory
from meliad_like.mixers.recurrent_states import RecurrentStates
from meliad_like.models.config import MODELS
from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.model import Model
from meliad_like.optimization.schedules import SCHEDULES, CosineSchedule
from meliad_like.planning.shrinking import rule_of
from meliad_like.vocabularies.base import BytesVocabularyConfig
from meliad_like.vocabularies.sentencepiece import SentencePieceVocabularyConfig


def states(model):
    return mixer_of(model, RecurrentStates)


ROWS = {row.gin_file: row for table in TABLES.values() for row in table.rows}
SIZES_OF_TABLE_4 = ("40m", "81m", "162m", "325m", "650m", "1300m")


def test_every_file_of_a_method_is_a_row():
    methods = [name for name in config.shipped_files() if name.startswith(("block_recurrent/", "mixer/"))]
    rows = (*config.read_table("block_recurrent/table1").values(), *config.read_table("mixer/table").values())
    assert sorted(file for row in rows for file in row.files) == methods


@pytest.mark.parametrize("file", ROWS)
def test_a_row_reads_32_lanes_of_4096_tokens_a_step_whatever_its_segments(file):
    run = config.parse([file])
    assert run.data.tokens_per_step == 32 * 4096
    one_window = "xl_" in file or "memorizing" in file
    assert run.data.segment_length == (run.model.window_length if one_window else 4096)
    assert run.training.num_steps == 500_000
    assert run.model.dropout_rate == 0.05


def test_the_page_counts_the_rows():
    """Those of the smallest scale, and all."""
    page, counts = (ROOT / "docs" / "experiments.md").read_text(), {}
    for name, first, of_all in re.findall(r"^\| \[?`(\w+)`[^|]*\| (\d+)(?: of (\d+))?:", page, re.MULTILINE):
        counts[name] = (int(first), int(of_all or first))
    expected = {"ancient_history": (len(rows_of("tiny", ())), len(ANCIENT_HISTORY.rows))}
    for name, table in SUBJECTS.items():
        largest = table.scales["tiny"].largest_vocabulary or np.inf
        first = [row for row in table.rows if not row.extra and row.vocabulary_size <= largest]
        expected[name] = (len(first), len(table.rows))
    assert counts == expected


@pytest.mark.parametrize("name", [name for name, table in SUBJECTS.items() if not table.pretrained])
def test_the_files_of_a_row_agree_with_the_tables_task(name):
    table = SUBJECTS[name]
    for row in table.rows:
        configure(row, table.scales["tiny"], [table.task])


def test_the_scaling_study_alone_has_a_cosine():
    schedules = {file: config.parse([file]).schedule for file in ROWS}
    assert {file for file, schedule in schedules.items() if isinstance(schedule, CosineSchedule)} == {
        row.gin_file for row in TABLES["table4"].rows
    }
    assert {(s.max_rate, s.min_rate) for s in schedules.values() if isinstance(s, CosineSchedule)} == {(0.01, 0.001)}
    assert {SCHEDULES.name_of(s) for s in schedules.values()} == {"cosine", "inverse_square_root"}


@pytest.mark.parametrize(
    ("table", "row", "column", "value"),
    [
        ("shortformer", "baseline", "training, tokens/s", 13_900),
        ("shortformer", "staged_128_50", "perplexity, sliding", 16.89),
        ("shortformer", "shortformer_128", "test perplexity", 18.15),
        ("recurrence", "baseline_300_200", "PG-19 test", 121.40),
        ("recurrence", "recurrent_300_50", "MFLOP a token", 210),
        ("ancient_history", "baseline", "WikiText-2, GPT2 small", 26.45),
        ("ancient_history", "learned_selector_released_code", "S2ORC, GPT2 small", 18.42),
    ],
)
def test_figures_of_the_papers(table, row, column, value):
    assert (SUBJECTS | {"ancient_history": ANCIENT_HISTORY})[table].row(row).paper[column] == value


@pytest.mark.parametrize("window", [128, 256, 512])
def test_windows_of_table_3(window):
    recurrent, slide = (
        config.parse([f"block_recurrent/table3/{kind}_window_{window}"]).model for kind in ("recurrent", "slide")
    )
    assert recurrent.window_length == slide.window_length == window
    assert (states(recurrent).num_states, recurrent_layers(recurrent), recurrent.total_layers) == (512, {9}, 12)
    assert (recurrent_layers(slide), slide.total_layers) == (set(), 12)


@pytest.mark.parametrize("number", [128, 256, 512, 1024, 2048])
def test_states_of_table_3(number):
    model = config.parse([f"block_recurrent/table3/states_{number}"]).model
    assert (model.window_length, states(model)) == (512, RecurrentStates(num_states=number))


@pytest.mark.parametrize("size", SIZES_OF_TABLE_4)
def test_parameters_of_table_4_are_the_papers_if_the_embedding_is_not_counted(size):
    names = [f"{kind}_{size}" for kind in ("recurrent", "xl")]
    embedding = 32_000 * config.parse([f"block_recurrent/table4/{names[0]}"]).model.model_width
    cells = [config.read_table("block_recurrent/table4")[name].cells for name in names]
    # The paper has one figure for both.
    without_embedding = np.mean([int(each["parameters"]) for each in cells]) - embedding
    assert without_embedding == pytest.approx(int(cells[0]["model size"]), rel=0.006)


@pytest.mark.parametrize("size", ["650m", "1300m"])
def test_the_largest_models_of_table_4_have_24_layers_and_their_baselines_26(size):
    recurrent, baseline = (
        config.parse([f"block_recurrent/table4/{kind}_{size}"]).model for kind in ("recurrent", "xl")
    )
    assert (recurrent.total_layers, recurrent_layers(recurrent)) == (24, {9, 19})
    assert (baseline.total_layers, recurrent_layers(baseline)) == (26, set())


def test_vocabularies_of_table_5():
    table = TABLES["table5"]
    for row in table.rows:
        run = config.parse([row.gin_file])
        assert run.model == config.parse(["block_recurrent/fixed_skip.gin"]).model
        if row.name == "bytes":
            assert isinstance(run.vocabulary, BytesVocabularyConfig)
        else:
            assert isinstance(run.vocabulary, SentencePieceVocabularyConfig)
            assert run.vocabulary.size == row.vocabulary_size
    # What they add is the embedding alone.
    few, many = (Model(run.model, size).num_parameters for size in (32_000, 128_000))
    assert many == few + (128_000 - 32_000) * 1024


def test_the_papers_scale_is_the_files_themselves():
    for row in ROWS.values():
        assert configure(row, SCALES["paper"]).model == config.parse([row.gin_file]).model


def shape(name: str, scale: str) -> tuple:
    run = configure(TABLES["table1"].row(name), SCALES[scale])
    m = run.model
    return (
        run.data.segment_length,
        m.window_length,
        states(m).num_states if states(m) else 0,
        m.total_layers,
        m.model_width,
        m.num_heads,
        m.head_size,
    )


def test_tiny_is_every_row_made_smaller_by_one_factor():
    assert shape("slide_12l", "tiny") == (256, 32, 0, 6, 64, 2, 32)
    assert shape("slide_13l", "tiny") == (256, 32, 0, 7, 64, 2, 32)
    assert shape("xl_2048", "tiny") == (128, 128, 0, 6, 64, 2, 32)
    assert shape("fixed_skip", "small") == (1024, 128, 128, 12, 256, 4, 64)
    memory = configure(TABLES["table1"].row("memorizing_64k"), SCALES["tiny"]).model
    assert mixer_of(memory, ExternalMemory) == ExternalMemory(num_slots=4096, num_neighbors=8)
    assert memory.layers_with(ExternalMemory) == [4]
    tall = configure(TABLES["table4"].row("recurrent_650m"), SCALES["tiny"]).model
    assert (tall.total_layers, tall.layers_with(RecurrentStates)) == (12, [4, 9])
    assert len({configure(row, SCALES["tiny"]).data.tokens_per_step for row in ROWS.values()}) == 1


def test_every_number_of_a_model_states_how_it_scales():
    for config_class in (*MODELS.values(), *MIXERS.values()):
        for field in dataclasses.fields(config_class):
            rule_of(config_class, field)

    @dataclasses.dataclass(frozen=True)
    class Forgetful(DecoderConfig):
        key_width: int = 16

    forgotten = next(field for field in dataclasses.fields(Forgetful) if field.name == "key_width")
    with pytest.raises(TypeError, match=r"Forgetful.key_width must state how it scales: key_width: int = size\(16, "):
        rule_of(Forgetful, forgotten)


def test_what_the_user_binds_is_not_scaled():
    row = TABLES["table1"].row("fixed_skip")
    params = ["DecoderConfig.window_length = 64", "TrainingConfig.num_steps = 7"]
    run = configure(row, SCALES["tiny"], (), [*params, "NUM_STATES = 1024"])
    assert (run.model.window_length, states(run.model).num_states, run.training.num_steps) == (64, 64, 7)


def test_stages_keep_their_share_of_the_steps_and_warmup_does_not():
    row, files, shares = TABLES["table1"].row("slide_12l"), ["option/short_segments_first.gin"], {}
    for scale, steps in (("tiny", 800), ("small", 5000), ("paper", 500_000)):
        run = configure(row, SCALES[scale], files)
        shares[scale] = run.stages.num_steps[0] / steps, run.data.segment_length / run.stages.segment_length[0]
    assert set(shares.values()) == {(0.5, 4.0)}
    run = configure(row, SCALES["tiny"], files, ["TrainingConfig.num_steps = 900"])
    assert (run.stages.num_steps, run.schedule.warmup_steps) == ((450,), 50)
    # What the user binds is not scaled.
    bound = ["StagesConfig.num_steps = (7,)", "StagesConfig.segment_length = (32,)"]
    stages = configure(row, SCALES["tiny"], gin_params=bound).stages
    assert (stages.num_steps, stages.segment_length) == ((7,), (32,))


def test_a_vocabulary_of_the_row_wins_over_the_tasks_and_has_a_store_of_its_own():
    row = TABLES["table5"].row("sentencepiece_1k")
    run = configure(row, SCALES["tiny"], ["task/standard_library.gin"])
    assert isinstance(run.vocabulary, SentencePieceVocabularyConfig) and run.vocabulary.size == 1000
    assert run.data.store == "stores/standard_library_bytes_sentencepiece_1k"
    # The task's vocabulary has settings that this row's has not.
    run = configure(TABLES["table5"].row("bytes"), SCALES["tiny"], ["task/pg19_tokens.gin"])
    assert isinstance(run.vocabulary, BytesVocabularyConfig)
    run = configure(TABLES["table1"].row("fixed_skip"), SCALES["tiny"], gin_params=["NUM_STATES = 256"])
    assert states(run.model).num_states == 16


def test_an_unknown_row_is_named():
    with pytest.raises(UserError, match="table3 has no row fixed_skip; it has recurrent_window_128, "):
        TABLES["table3"].row("fixed_skip")
