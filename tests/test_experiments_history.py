"""Table 1 of ancient history: its rows and scales, one made from a tiny model, and the report."""

import csv
import dataclasses
import json

import forked
import jax
import pytest
from history_runs import BINDINGS, make_place
from table_results import table_rows

from meliad_like.config import with_changes
from meliad_like.errors import UserError
from meliad_like.experiments import ancient_history
from meliad_like.experiments.ancient_history import HistoryExperiment
from meliad_like.experiments.tables.ancient_history import ALWAYS, SCALES, TABLE, rows_of
from meliad_like.history.gains import TargetLosses
from meliad_like.history.settings import HistorySettings
from meliad_like.mesh import make_mesh
from meliad_like.run import opening

ROWS = TABLE.rows


@pytest.fixture(autouse=True)
def one_device(monkeypatch):
    monkeypatch.setattr(opening, "make_mesh", lambda mesh: make_mesh(mesh, jax.devices()[:1]))


def test_rows_of_a_scale():
    assert {row.name for row in ROWS} - {row.name for row in rows_of("tiny", ())} == {"learned_selector_released_code"}
    assert [row.name for row in rows_of("tiny", ("score_oracle",))] == [
        "baseline", "random", "overlap_oracle", "score_oracle",
    ]  # fmt: skip
    with pytest.raises(UserError, match="ancient_history has no row best; it has baseline, random, "):
        rows_of("small", ("best",))


@pytest.mark.parametrize("name", SCALES)
def test_scales_are_configs(name):
    settings = with_changes(HistorySettings(), SCALES[name].settings)
    history = settings.history
    sizes = history.window_length, history.history_length, history.span_length, history.stride
    assert sizes == ((256, 128, 32, 64) if name == "tiny" else (1024, 512, 64, 256))
    assert settings.selector.encoder_layers == (4 if name == "tiny" else 0)


def experiment(place, **changes):
    scale = dataclasses.replace(SCALES["tiny"], settings={}, scored_tokens=None, batch_size=4)
    params = [
        f"FolderSourceConfig.folder = '{place / 'documents'}'",
        "RunConfig.source = 'text'",
        f"ReaderConfig.store = '{place / 'store'}'",
    ]
    made = HistoryExperiment(
        "tiny", (), (*params, *BINDINGS), place / "table", load_dir=str(place / "model"), **changes
    )
    return made, scale


@pytest.mark.thorough
def test_the_table_is_made_once(tmp_path, monkeypatch):
    place = make_place(tmp_path)
    made, scale = experiment(place)
    monkeypatch.setattr(HistoryExperiment, "scale", scale)
    monkeypatch.setattr(ancient_history, "rows_of", lambda scale, chosen: ROWS)
    assert made.make() == 0
    text = made.report()
    *tables, selectors = (table_rows(part) for part in text.split("\n\n") if part.startswith("|"))
    perplexities, compared, costs, papers = tables
    assert list(perplexities) == list(compared) == list(costs) == [
        "original: the most recent text", "random spans", "the most recent spans", "overlap with the prefix",
        "overlap oracle (leaks the future)", "learned selector",
        "learned selector as in the released code (leaks the future)", "score oracle (leaks the future)",
    ]  # fmt: skip
    assert papers["overlap oracle"]["WikiText-2, GPT2 small"] == "25.93"
    oracle = compared["score oracle (leaks the future)"]
    assert oracle["share of the score oracle's gain"].startswith("100% (100% to 100%)")
    ratios = [float(costs[row]["selection / model"]) for row in ("random spans", "learned selector", [*costs][-2])]
    assert 0 == ratios[0] < ratios[1] < ratios[2]
    learned = selectors["learned selector"]
    assert learned["steps"] == "6" and -1 <= float(learned["correlation"]) <= 1
    table = {row["row"]: row for row in csv.DictReader((place / "table" / "ancient_history.csv").open(newline=""))}
    saved = json.loads((place / "table" / "evaluation" / "evaluation.json").read_text())
    oracle = next(row for row in saved["selections"] if row["name"] == "score_oracle")
    assert float(table["score_oracle"]["change"]) == oracle["change"]
    assert table["learned_selector_released_code"]["leaks_the_future"] == "True"
    assert (place / "table" / "ancient_history.png").stat().st_size > 10_000

    def refuse(*_):
        raise AssertionError("the model reads again")

    before = (place / "table" / "evaluation" / "evaluation.json").read_text()
    with monkeypatch.context() as patch:
        patch.setattr(TargetLosses, "__call__", refuse)
        assert experiment(place)[0].make() == 0
        assert (place / "table" / "evaluation" / "evaluation.json").read_text() == before
        with pytest.raises(AssertionError, match="the model reads again"):
            experiment(place, split="train")[0].make()
    # How the model computes is part of it, and decides the scores.
    rounded = dataclasses.replace(made, gin_params=(*made.gin_params, "PretrainedConfig.matmul_dtype = 'bfloat16'"))
    with pytest.raises(UserError, match="scores/numbers.jsonl belongs to another config: StoreInfo.maker is"):
        rounded.make()
    faster = dataclasses.replace(made, gin_params=(*made.gin_params, "Adam.base_rate = 1.0"))
    with pytest.raises(UserError, match="learned_selector belongs to another config: training.Adam.base_rate is"):
        faster.make()

    # Rows of other documents replace the evaluated ones without a flag.
    monkeypatch.setattr(ancient_history, "rows_of", lambda scale, chosen: [row for row in ROWS if row.name in ALWAYS])
    assert experiment(place, split="train")[0].make() == 0
    saved = json.loads((place / "table" / "evaluation" / "evaluation.json").read_text())
    assert (saved["split"], [row["name"] for row in saved["selections"]]) == ("train", list(ALWAYS))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "ancient_history begins with a pretrained model: give --load_dir=DIR; python -m meliad_like.convert"),
        (["--seeds=1", "--load_dir=x"], "--seeds has no effect on ancient_history"),
        (["--report", "--folder=none"], "nothing was evaluated yet in none: the same command without --report"),
    ],
)
def test_the_command_line_is_checked(arguments, message):
    done = forked.run("-m", "meliad_like.experiments", "ancient_history", *arguments)
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr
