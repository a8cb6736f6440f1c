"""The command that makes the paper's tables: runs, their times, and the reports."""

import fcntl
import json
from types import SimpleNamespace

import forked
import jax
import numpy as np
import pandas as pd
import pytest
import tiny_run
from table_results import table_rows, write_result
from tiny_run import mesh_of_the_first_devices

from meliad_like.config import read_table
from meliad_like.errors import UserError
from meliad_like.experiments import pictures
from meliad_like.experiments.experiment import Experiment
from meliad_like.experiments.report import Results, gather, read_result, result_file
from meliad_like.experiments.step_time import WARM_UP, relative_time, time_in_turn
from meliad_like.experiments.tables import SUBJECTS, TABLES
from meliad_like.experiments.tables.block_recurrent import SCALES
from meliad_like.experiments.tables.table import Scale

SMALL = [
    "DecoderConfig.num_layers = 1",
    "DecoderConfig.model_width = 16",
    "DecoderConfig.num_heads = 2",
    "DecoderConfig.head_size = 8",
    "DecoderConfig.feedforward_width = 32",
    "DecoderConfig.window_length = 16",
    "ReaderConfig.segment_length = 64",
    "ReaderConfig.tokens_per_step = 128",
    "MeshConfig.data = 1",
]


@pytest.fixture(scope="module")
def bindings(tmp_path_factory):
    """The bindings of a run on synthetic documents."""
    made = tiny_run.make_bindings(tmp_path_factory.mktemp("documents"))
    return [
        b
        for b in made
        if b.startswith(("RunConfig.source", "FolderSourceConfig", "ReaderConfig.store", "VocabularyConfig"))
    ] + SMALL


def experiment(folder, table="table1", **changes) -> Experiment:
    settings = {
        "scale_name": "tiny",
        "gin_files": ("task/standard_library.gin",),
        "gin_params": (),
        "seeds": (0, 1),
    } | changes
    return Experiment(table=SUBJECTS[table], folder=folder, **settings)


@pytest.mark.thorough
def test_a_run_is_done_once_and_resumes(bindings, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("meliad_like.experiments.experiment.make_mesh", mesh_of_the_first_devices)

    def made(num_steps: int, *more: str, split="validation"):
        # A cosine would depend on the number of steps, and could not be resumed with another one.
        schedule = "RunConfig.schedule = 'inverse_square_root'"
        params = (*bindings, schedule, f"TrainingConfig.num_steps = {num_steps}", *more)
        return experiment(tmp_path, gin_params=params, split=split)

    row = TABLES["table1"].row("slide_12l"), 1
    assert not made(3).finished(*row)
    assert made(3).make_row(*row) == 0
    assert "from step 0 to 3" in capsys.readouterr().out
    assert made(3).finished(*row)
    assert not made(3, split="test").finished(*row)
    result = read_result(tmp_path, *row)
    assert (result["num_steps"], result["seed"], result["window_length"]) == (3, 1, 16)
    assert 6 < result["splits"]["validation"]["bits_per_byte"] < 12

    assert not made(5).finished(*row)
    assert made(5).make_row(*row) == 0
    assert "from step 3 to 5" in capsys.readouterr().out
    assert read_result(tmp_path, *row)["num_steps"] == 5

    with pytest.raises(UserError, match="DecoderConfig.window_length is 16 there.*; choose another --folder"):
        made(5, "DecoderConfig.window_length = 32").finished(*row)
    with pytest.raises(UserError, match="split 'test' has no documents"):
        made(5, split="test").make_row(*row)
    with (tmp_path / "slide_12l-1" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another process is working in .*slide_12l-1"):
            made(5).make_row(*row)


def test_the_command_trains_a_row_and_reports_what_is_there(bindings, tmp_path, capsys):
    bindings = (*bindings, "TrainingConfig.num_steps = 2")
    params = [f"--gin_param={b}" for b in bindings]
    words = ["-m", "meliad_like.experiments", "table1", f"--folder={tmp_path}", "--split=validation"]
    words += ["--row=slide_12l", "--seeds=3", *params]
    first = tiny_run.run_command(words, num_devices=1)
    assert first.returncode == 0, first.stderr
    assert "slide_12l-3, 1 of 1 that are not finished\n" in first.stdout
    assert f"wrote {tmp_path}/table1.md, .csv and .png" in first.stdout
    assert (tmp_path / "table1.png").exists()
    again = experiment(tmp_path, gin_params=bindings, seeds=(3,), row_names=("slide_12l",), split="validation")
    assert again.make() == (0, [])
    assert capsys.readouterr().out == ""


@pytest.fixture
def with_store(tmp_path):
    """Where a token store seems to be."""
    (tmp_path / "store.json").touch()
    return {"gin_params": (f"ReaderConfig.store = '{tmp_path}'",)}


def test_a_run_that_failed_is_named_and_the_next_one_is_made(tmp_path, with_store, monkeypatch, capsys):
    def fail(self, row, seed):
        raise UserError(f"no {row.name}")

    monkeypatch.setattr(Experiment, "make_row", fail)
    made = experiment(tmp_path, seeds=(0,), row_names=("slide_12l", "slide_13l"), **with_store)
    assert made.make() == (0, ["slide_12l-0", "slide_13l-0"])
    assert "failed slide_12l-0: no slide_12l\nslide_13l-0, 2 of 2 that are" in capsys.readouterr().out


def test_a_run_that_was_stopped_is_the_last(tmp_path, with_store, monkeypatch):
    started = []
    monkeypatch.setattr(Experiment, "make_row", lambda self, row, seed: started.append(row.name) or 75)
    made = experiment(tmp_path, seeds=(0,), row_names=("slide_12l", "slide_13l"), **with_store)
    assert made.make() == (75, []) and started == ["slide_12l"]


def test_rows_that_are_the_same_model_share_a_run(tmp_path, with_store, monkeypatch):
    started, timed = [], []
    monkeypatch.setattr(Experiment, "make_row", lambda self, row, seed: started.append((row.name, seed)) and 0)
    monkeypatch.setattr(Experiment, "time_steps", lambda self: timed.append(self))
    made = experiment(tmp_path, "table3", seeds=(7,), **with_store)
    made.make()
    assert {("recurrent_window_512", 7), ("states_512", 7)} < set(started) and timed == [made]
    folders = {result_file(tmp_path, made.table.row(name), 7).parent for name in ("recurrent_window_512", "states_512")}
    assert folders == {tmp_path / "recurrent_window_512-7"}


def test_vocabularies_that_are_too_large_for_a_scale_are_made_when_they_are_named(tmp_path):
    assert [row.name for row in experiment(tmp_path, "table5").rows][-1] == "sentencepiece_8k"
    assert [row.name for row in experiment(tmp_path, "table5", row_names=("sentencepiece_64k",)).rows] == [
        "sentencepiece_64k"
    ]


def test_steps_are_timed_alternately():
    order = []
    run = SimpleNamespace(model=SimpleNamespace(activation_dtype="float32"), data=SimpleNamespace(tokens_per_step=10))

    class Step:
        model, memory_bytes, compile_seconds = SimpleNamespace(flops=SimpleNamespace(training=100.0)), 7, 1.5

        def __init__(self, name: str):
            self.name, self.run, self.seconds = name, run, []

        def __call__(self):
            order.append(self.name)
            self.seconds.append(1.0 + len(order))

    timing = time_in_turn({"a": Step("a"), "b": Step("b")}, repeats=3)
    assert order == ["a", "b"] * (WARM_UP + 3)
    assert timing["rows"]["a"]["seconds"] == [6.0, 8.0, 10.0]
    assert timing["rows"]["b"]["share_of_peak"] == pytest.approx(100 * 10 / 9 / timing["peak"] / jax.device_count())


def test_step_times_are_compared_within_a_round():
    # The machine became ten times slower in the middle.
    rows = {"slow": {"seconds": [2.0, 2.2, 20.0]}, "fast": {"seconds": [1.0, 1.1, 10.0]}}
    assert relative_time(rows, "slow", "fast") == pytest.approx(2.0)


def test_times_and_memory_of_rows_are_written_for_the_table(tmp_path, monkeypatch):
    monkeypatch.setitem(
        SCALES, "tiny", Scale(64, 12, bindings={"ReaderConfig.tokens_per_step": 64, "MeshConfig.data": 1})
    )
    monkeypatch.setattr("meliad_like.experiments.step_time.make_mesh", mesh_of_the_first_devices)
    made = experiment(tmp_path, gin_params=("DecoderConfig.head_size = 8",), row_names=("slide_12l",), repeats=1)
    assert not made.timed
    made.time_steps()
    assert made.timed
    row = json.loads((tmp_path / "step_time.json").read_text())["rows"]["slide_12l"]
    # Parameters, momentum and second moments, in float32.
    assert row["memory_bytes"] > 3 * 4 * row["parameters"]
    results = gather(TABLES["table1"], tmp_path, [0], "test")
    assert results.means.at["slide_12l", "milliseconds"] == pytest.approx(1e3 * row["seconds"][0])
    assert np.isnan(results.means.at["slide_12l", "step_time"])  # its baseline was not timed


def write_bits(folder, row: str, *bits: float) -> None:
    for seed, each in enumerate(bits):
        write_result(folder, TABLES["table1"].row(row), seed, bits_per_token=each, bits_per_byte=each / 2)


def test_a_table_of_partial_results(tmp_path):
    write_bits(tmp_path, "slide_13l", 2.0, 3.0)
    write_bits(tmp_path, "fixed_skip", 1.8, 2.6)
    write_result(tmp_path, TABLES["table1"].row("lstm_dual"), 1, bits_per_byte=1.4)
    timing = {"fixed_skip": {"seconds": [1.2, 2.4], "memory_bytes": 3_000_000, "share_of_peak": 0.5, "device": "CPU"}}
    timing["slide_13l"] = timing["fixed_skip"] | {"seconds": [1.0, 2.0]}
    (tmp_path / "step_time.json").write_text(json.dumps({"rows": timing}))
    text = experiment(tmp_path).report()
    assert text == (tmp_path / "table1.md").read_text()
    assert (
        "Scale tiny: 1,800 steps of 512 tokens; seeds 0, 1. Evaluated on all of test: 2 documents, 5,000 bytes" in text
    )
    assert "relative to: Slide:13L." in text
    # A terminal is too narrow for rows and columns without figures, and for facts of the configs.
    shown = experiment(tmp_path).results().for_terminal()
    header = {"model", "bits per token", "bits per byte", "difference", "step time", "runs"}
    assert set(shown.header) == header and len(shown.rows) == 3
    rows = table_rows(text)
    fixed_skip, lstm_dual = rows["Rec:fixed:skip"], rows["Rec:lstm:dual"]
    assert fixed_skip["bits per token"] == "2.2000 ± 0.4000"
    assert fixed_skip["difference"] == "-0.1500 ± 0.0500"
    assert (fixed_skip["step time"], fixed_skip["memory of a step, MB"], fixed_skip["runs"]) == ("1.200", "3.0", "2")
    assert (fixed_skip["paper: PG19 bytes"], fixed_skip["paper: step time"]) == ("0.952", "0.99")
    assert (lstm_dual["bits per byte"], lstm_dual["difference"], lstm_dual["step time"]) == ("1.4000", "-0.1000", "-")
    assert rows["XL:512"]["bits per byte"] == "-"
    saved = pd.read_csv(tmp_path / "table1.csv").set_index("row")
    assert saved.at["fixed_skip", "bits_per_byte"] == pytest.approx(1.1)
    assert saved.at["fixed_skip", "difference_error"] == pytest.approx(0.05)
    assert np.isnan(saved.at["xl_512", "bits_per_byte"]) and saved.at["xl_512", "paper: GitHub"] == 1.21
    assert list(saved.index) == [row.name for row in TABLES["table1"].rows if not row.extra]


def test_the_table_of_mixers_has_all_their_files(tmp_path):
    table = SUBJECTS["mixers"]
    assert [row.gin_file for row in table.rows[3:]] == [f"mixer/table/{name}" for name in read_table("mixer/table")]
    for row, bits in (("slide_13l", 1.0), ("retention", 0.9)):
        write_result(tmp_path, table.row(row), bits_per_byte=bits)
    rows = table_rows(experiment(tmp_path, "mixers", seeds=(0,)).results().to_markdown("tiny"))
    assert (rows["RetNet"]["difference"], rows["Mamba-2"]["difference"]) == ("-0.1000", "-")
    assert not any("paper" in header for header in rows["Slide:13L"])


def test_a_mean_does_not_leave_out_the_run_that_was_not_finite(tmp_path):
    write_bits(tmp_path, "slide_13l", 2.0, 3.0)
    write_bits(tmp_path, "fixed_skip", 2.0)
    write_result(tmp_path, TABLES["table1"].row("fixed_skip"), 1, bits_per_byte=None)
    results = gather(TABLES["table1"], tmp_path, [0, 1], "test")
    assert results.means.at["slide_13l", "bits_per_byte"] == 1.25
    for measure in ("bits_per_byte", "difference"):
        assert np.isnan(results.means.at["fixed_skip", measure])
        assert np.isnan(results.errors.at["fixed_skip", measure])
    pictures.draw(results, tmp_path / "drawn.png")


@pytest.mark.parametrize("name", [name for name, table in SUBJECTS.items() if table.panels])
def test_every_table_has_a_picture_of_whatever_is_there(tmp_path, name, monkeypatch):
    table, figures = SUBJECTS[name], []
    # Other tests write pictures: the pixels take most of the time.
    monkeypatch.setattr(pictures, "save", lambda figure, path: figures.append(figure))
    pictures.draw(gather(table, tmp_path, [0], "test"), tmp_path)
    for i, row in enumerate(table.rows[:-1]):
        flops = {"flops_by_the_paper": 1e8 + 1e6 * i, "single_tokens_per_second": 900.0}
        write_result(tmp_path, row, word_perplexity=60.0 - i, **flops)
    results = gather(table, tmp_path, [0], "test", table.rows)
    pictures.draw(results, tmp_path)
    figures[1].draw_without_rendering()
    lines = ([line.get_xydata() for axes in figure.axes for line in axes.lines] for figure in figures)
    empty, full = (sum(np.isfinite(line).all(axis=1).sum() for line in each) for each in lines)
    assert full > empty
    text = results.to_markdown("tiny")
    assert all(f"| {row.label} |" in text for row in table.rows)


def test_columns_of_table_5(tmp_path):
    write_result(tmp_path, TABLES["table5"].row("sentencepiece_1k"))
    cells = table_rows(experiment(tmp_path, "table5").results().to_markdown("tiny"))["SentencePiece 1k"]
    assert (cells["token count"], cells["scale factor"], cells["word perplexity"]) == ("2,500", "1.5000", "40.00")
    assert cells["paper: token count"] == "15,865,499"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["experiments", "table1", "--repeats=0"], "flag --repeats=0: 0 is not a positive integer"),
        (
            ["experiments", "table1", "--report", "--folder=none"],
            "nothing was evaluated yet in none: the same command without --report does that",
        ),
        (
            ["plan", "--topology=cpu:1", "--vocabulary_size=-5"],
            "flag --vocabulary_size=-5: -5 is not a positive integer",
        ),
    ],
)
def test_a_mistake_is_one_line(arguments, message):
    done = forked.run("-m", f"meliad_like.{arguments[0]}", *arguments[1:])
    assert (done.returncode, done.stderr) == (2, f"error: {message}\n")


def test_rows_that_were_not_trained_for_as_long_are_named():
    facts = {"max_tokens": None, "num_documents": 2, "num_bytes": 9, "split": "test", "device": "cpu", "seconds": 1.0}
    index = pd.MultiIndex.from_product([["slide_12l", "slide_13l"], [0, 1]], names=["row", "seed"])
    runs = pd.DataFrame([{**facts, "tokens_per_step": 64, "num_steps": steps} for steps in (30, 30, 31, 31)], index)
    lengths = "30 steps of 64 tokens: slide_12l; 31 steps of 64 tokens: slide_13l"
    mixed, same = (
        Results(TABLES["table1"], (), each, each, each, ()).notes("tiny") for each in (runs, runs.assign(num_steps=30))
    )
    assert f"**Not all rows were trained for as long:** {lengths}." in mixed and len(same) == len(mixed) - 1
