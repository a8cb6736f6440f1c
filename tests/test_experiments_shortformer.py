"""The Shortformer paper's tables: their rows at each scale, the training of two of them, and the report."""

import contextlib
import dataclasses
import json

import numpy as np
import pytest
import tiny_run
from fake_split import FakeSplit
from table_results import table_rows, write_result
from tiny_run import mesh_of_the_first_devices

from meliad_like import config
from meliad_like.config.run import stages_of
from meliad_like.experiments.experiment import Experiment
from meliad_like.experiments.report import read_result
from meliad_like.experiments.step_time import in_shares
from meliad_like.experiments.tables import SUBJECTS
from meliad_like.experiments.tables.table import Scale, configure

TABLE = SUBJECTS["shortformer"]
EPOCH = 1401
# L = 3072 becomes 96, 512 becomes 16 and 128 becomes 4; one layer of width 16.
TINIEST = Scale(
    divisor=64,
    lengths=32,
    layers=16,
    bindings={
        "ShortformerConfig.cutoffs": (),
        "ReaderConfig.tokens_per_step": 192,
        "TrainingConfig.num_steps": 6,
        "TrainingConfig.log_every": 1,
        "MeshConfig.data": 1,
    },
    keep_share_of_warmup=True,
    max_tokens=300,
    timed_tokens=5,
)


def shape(run) -> tuple:
    """Of each stage: steps, L and L'; and where positions are added."""
    stages = [(s.last_step - s.first_step, s.run.data.segment_length, s.run.model.cache_length) for s in stages_of(run)]
    return (*stages, run.model.position)


@pytest.mark.parametrize(
    "name, expected",
    [
        ("baseline", ((286_000, 3072, 0), "input")),
        ("baseline_256", ((286_000, 256, 0), "input")),
        ("staged_64_175", ((175 * EPOCH, 64, 0), (286_000 - 175 * EPOCH, 3072, 0), "input")),
        ("infused_cache_1024", ((286_000, 1024, 1024), "infused")),
        ("infused_cache_512_256", ((286_000, 512, 256), "infused")),
        ("cache_not_infused", ((286_000, 3072, 3072), "input")),
        ("shortformer_128", ((100 * EPOCH, 128, 128), (286_000 - 100 * EPOCH, 512, 512), "infused")),
    ],
)
def test_a_row_is_its_gin_files(name, expected):
    assert shape(configure(TABLE.row(name), TABLE.scales["paper"])) == expected


def test_there_are_as_many_rows_as_in_tables_1_to_4():
    assert len(TABLE.rows) == 8 + 7 * 8 + 8 + 2 + 3 + 4


def test_at_every_scale_rows_have_the_same_tokens_and_first_stages_their_share():
    for name, scale in TABLE.scales.items():
        runs = {row.name: configure(row, scale) for row in TABLE.rows if not row.extra}
        assert len({(run.data.tokens_per_step, run.training.num_steps) for run in runs.values()}) == 1
        for row, epochs in (("staged_128_50", 50), ("staged_512_150", 150), ("shortformer_64", 100)):
            share = runs[row].stages.num_steps[0] / runs[row].training.num_steps
            assert share == pytest.approx(epochs * EPOCH / 286_000, abs=0.001), name
    tiny = configure(TABLE.row("shortformer_128"), TABLE.scales["tiny"])
    assert shape(tiny) == ((882, 16, 16), (918, 64, 64), "infused")
    assert (tiny.model.num_layers, tiny.model.model_width, tiny.model.num_heads, tiny.model.head_size) == (4, 64, 2, 32)
    assert configure(TABLE.row("baseline"), TABLE.scales["tiny"]).data.segment_length == 384


def test_first_stages_and_warmup_follow_the_users_number_of_steps():
    run = configure(TABLE.row("staged_128_100"), TABLE.scales["tiny"], gin_params=["TrainingConfig.num_steps = 100"])
    assert (run.stages.num_steps, run.schedule.warmup_steps) == ((49,), 5)
    paper = configure(TABLE.row("staged_128_100"), TABLE.scales["paper"])
    assert paper == config.parse(["shortformer/tables/staged_128_100"])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A staged row and one with a cache, trained, evaluated and timed."""
    folder = tmp_path_factory.mktemp("shortformer")
    bindings = tiny_run.make_bindings(folder)
    made = Experiment(
        table=dataclasses.replace(TABLE, scales={"tiny": TINIEST}),
        scale_name="tiny",
        gin_files=(),
        gin_params=tuple(
            b
            for b in bindings
            if b.startswith(("RunConfig.source", "FolderSourceConfig", "ReaderConfig.store", "VocabularyConfig"))
        ),
        folder=folder,
        seeds=(0,),
        row_names=("staged_128_50", "infused_cache_512"),
        split="validation",
        repeats=2,
    )
    with pytest.MonkeyPatch.context() as patch:
        for module in ("experiment", "step_time"):
            patch.setattr(f"meliad_like.experiments.{module}.make_mesh", mesh_of_the_first_devices)
        # test_experiments.py times a step that it compiles anew.
        patch.setattr("meliad_like.experiments.step_time.without_compiled_programs", contextlib.nullcontext)
        assert made.make() == (0, [])
        made.time_steps()
    return made


@pytest.mark.thorough
def test_rows_are_evaluated_as_one_stream(trained):
    assert all(trained.finished(row, 0) for row in trained.rows)
    staged, cached = (read_result(trained.folder, row, 0)["splits"]["validation"] for row in trained.rows)
    # Of both, the same tokens; a byte each.
    assert staged["num_tokens"] == cached["num_tokens"] == staged["num_bytes"] == 300
    assert 6 < cached["bits_per_byte"] < 12
    assert staged["sliding_perplexity"] != staged["perplexity"]
    # Nothing slides over what remembers.
    assert "sliding_perplexity" not in cached
    assert min(staged["single_tokens_per_second"], cached["single_tokens_per_second"]) > 0


@pytest.mark.thorough
def test_steps_of_stages_are_timed_and_mixed(trained):
    timing = json.loads((trained.folder / "step_time.json").read_text())["rows"]
    assert set(timing) == {"staged_128_50", "infused_cache_512"}
    assert timing["staged_128_50"]["share_of_first_stage"] == pytest.approx(1 / 6)
    markdown = trained.report()
    assert "| Staged: L 128 for 50 epochs | 96 | 0 | 17% |" in markdown
    # Rows of the whole paper that nobody asked for are not gaps.
    assert "Baseline, L 32 " not in markdown
    assert (trained.folder / "shortformer.png").exists()


def test_what_a_mixture_of_steps_takes():
    parts = {
        "short": {"seconds": [1.0, 2.0, 1.0], "memory_bytes": 10, "compile_seconds": 3.0, "share_of_peak": 0.2},
        "long": {"seconds": [3.0, 6.0, 3.0], "memory_bytes": 40, "compile_seconds": 4.0, "share_of_peak": 0.4},
    }
    mixed = in_shares(parts, {"short": 0.75, "long": 0.25})
    assert mixed["seconds"] == [1.5, 3.0, 1.5]
    assert (mixed["memory_bytes"], mixed["compile_seconds"]) == (40, 7.0)
    # Half of the time at each.
    assert mixed["share_of_peak"] == pytest.approx(0.3)
    assert in_shares(parts, {"long": 1.0}) == parts["long"]


def test_a_part_of_the_documents_is_their_beginnings():
    class Split(FakeSplit):
        def __init__(self, lengths):
            super().__init__(lengths)
            self.num_bytes, self.num_words = np.array([70, 80, 90]), np.array([7, 8, 9])

    class Numbers:
        """A token is its position and a space."""

        prefix = b""

        def decode_bytes(self, tokens):
            return b"".join(b"%d " % (token % 1000) for token in tokens)

    part = Split([10, 3000, 3000]).beginnings(Numbers(), 30)
    # Too little for more than one document, which is whole, and has its own bytes.
    assert (part.lengths.tolist(), part.num_bytes.tolist(), part.num_words.tolist()) == ([10], [70], [7])
    part = Split([10, 500, 900]).beginnings(Numbers(), 2400)
    assert (part.lengths.tolist(), list(part.names)) == ([10, 500], ["document_0", "document_1"])
    part = Split([10, 30, 9]).beginnings(Numbers(), 3000)
    assert part.num_bytes.tolist() == [70, 80, 90]
    part = Split([10, 3000, 9]).beginnings(Numbers(), 3012)
    assert (part.lengths.tolist(), part.num_words.tolist()) == ([10, 1004, 9], [7, 1004, 9])
    assert part.tokens(1, 0, 3).tolist() == [1000, 1001, 1002]


def test_the_report(tmp_path):
    def write(name, seed, perplexity, **figures):
        some = {"num_tokens": 290, "num_bytes": 300, "max_tokens": 300, "bits_per_byte": perplexity / 4}
        write_result(tmp_path, TABLE.row(name), seed, perplexity=perplexity, **some, **figures)

    for seed in (0, 1):
        write("baseline", seed, 8.0 + seed, sliding_bits_per_byte=1.9)
        write("staged_128_50", seed, 7.0 + seed)
    write("staged_512_150", 0, 7.5)
    write("infused_cache_512", 0, 6.0, single_tokens_per_second=900.0)
    timing = {"baseline": {"seconds": [0.2, 0.4], "tokens_per_step": 768, "memory_bytes": 1, "device": "CPU"}}
    timing["staged_128_50"] = timing["baseline"] | {"seconds": [0.15, 0.3]}
    (tmp_path / "step_time.json").write_text(json.dumps({"rows": timing}))
    text = Experiment("tiny", (), (), tmp_path, seeds=(0, 1), table=TABLE).results().to_markdown("tiny")
    assert "Evaluated on a part of test: 290 tokens, 300 bytes." in text
    rows = table_rows(text)
    staged = rows["Staged: L 128 for 50 epochs"]
    assert staged["perplexity"] == "7.5 ± 0.5000"
    assert staged["difference"] == "-0.2500 ± 0.0000"
    assert (staged["step time"], staged["paper: step time"], staged["paper: perplexity"]) == ("0.750", "0.87", "17.52")
    assert staged["training, tokens/s"] == "3,413"
    assert rows["PIA + cache, L 512"]["token by token, tokens/s"] == "900"
    assert "Baseline, L 512" not in rows
