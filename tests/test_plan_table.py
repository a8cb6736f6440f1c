"""The tables of docs/planning.md, and what runs of the papers' sizes hold, against a count by hand."""

import re
from pathlib import Path

import pytest

from meliad_like.config import parse
from meliad_like.experiments import plan_table
from meliad_like.mesh import MeshConfig, make_mesh
from meliad_like.planning.programs import state_parts
from meliad_like.training.program import make_program

V = 32_000


def count_by_hand(layers, d, inner, f, recurrent, states):
    """Parameters of a decoder whose recurrent layers are fixed:skip; norms, biases and scales are left out."""
    layer = 4 * d * inner + 2 * d * f
    # The tokens' second query and the other half of their output; four projections of states, and the output of both
    # their attentions; initial states and state ids.
    recurrence = d * inner + inner * d + 4 * d * inner + 2 * inner * d + 2 * states * d
    return V * d + layers * layer + recurrent * recurrence


@pytest.mark.parametrize(
    ("size", "mesh", "expected"),
    [
        ("size/medium_150m.gin", MeshConfig(), count_by_hand(12, 1024, 1024, 4096, 1, 512)),
        ("size/tall_1200m.gin", MeshConfig(), count_by_hand(24, 2048, 2048, 8192, 2, 512)),
        ("size/tall_1200m.gin", MeshConfig(fsdp=2, tensor=4), count_by_hand(24, 2048, 2048, 8192, 2, 512) / 8),
    ],
)
def test_the_papers_sizes_by_hand(size, mesh, expected):
    run = parse([size, "block_recurrent/fixed_skip.gin"])
    parts = state_parts(make_program(run, V, make_mesh(mesh)))
    assert parts["parameters"] == pytest.approx(4 * expected, rel=0.1)
    # Adafactor: momentum as large as the parameters; second moments as row and column sums, a thousandth of them.
    assert parts["optimizer state"] == pytest.approx(4 * expected, rel=0.1)


def test_every_row_of_the_papers_is_in_the_table():
    found = list(plan_table.entries())
    files = {entry.file for entry in found}
    assert {"block_recurrent/fixed_skip.gin", "shortformer/table2/epochs_25.gin"} < files
    assert "shortformer/protocol.gin" not in files
    assert all(
        Path(entry.file).parent.as_posix() in {setting.folder for setting in plan_table.SETTINGS} for entry in found
    )
    keys = {(entry.file, entry.topology): entry.key for entry in found}
    # A row of table 3 is the model of table 1, and learning rates make no other program.
    same = ("block_recurrent/fixed_skip.gin", "block_recurrent/table3/states_512.gin")
    assert len({keys[file, "v4:2x2x4"] for file in same}) == 1
    assert len({keys[same[0], topology] for topology in plan_table.CHIPS_16}) == 3


@pytest.fixture
def few(monkeypatch):
    """Two files on two topologies; none is compiled."""
    chosen = [e for e in plan_table.entries(plan_table.SETTINGS[:1]) if re.search(r"slide_12l|xl_512", e.file)]
    chosen = [e for e in chosen if e.topology in ("v4:2x2x4", "v5e:4x4")]
    compiled = []

    def compile_entry(entry):
        compiled.append((entry.file, entry.topology))
        if entry.topology.startswith("v5e"):
            return {"error": "6 lanes do not divide"}
        fits = "slide" in entry.file
        need = {"total": 3 * 2**30, "fits": fits, "seconds": {"arithmetic": 0.25}, "limited_by": "arithmetic"}
        return {"programs": [need]}

    monkeypatch.setattr(plan_table, "entries", lambda: iter(chosen))
    monkeypatch.setattr(plan_table, "compile_entry", compile_entry)
    return compiled


def test_the_command_resumes_from_its_folder(few, tmp_path):
    plan_table.make(tmp_path / "new", ["v4", "slide"])
    assert len(few) == 1
    page = tmp_path / "new" / "table.md"
    assert "| `slide_12l` | 3.0; 250 ms | not compiled yet |" in page.read_text()
    assert "xl_512" not in page.read_text()
    plan_table.make(tmp_path / "new", [])
    assert len(few) == len(set(few)) == 4
    assert page.read_text().startswith("| `block_recurrent` | v4:2x2x4 | v5e:4x4 |\n")
    assert "| `xl_512` | **3.0** | lanes don't divide |" in page.read_text()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("block_recurrent/fixed_skip.gin@v4:2x2x4", 9.4),
        ("block_recurrent/fixed_skip.gin@v5e:4x4", 9.3),
        ("block_recurrent/table4/recurrent_1300m.gin@v4:2x2x4", 42.7),
    ],
)
def test_three_figures_of_the_page_compiled_again(name, gib):
    """Minutes each, and needs the TPU's compiler."""
    pytest.importorskip("libtpu")
    (entry,) = (entry for entry in plan_table.entries() if f"{entry.file}@{entry.topology}" == name)
    (actual,) = plan_table.compile_entry(entry)["programs"]
    assert actual["total"] / 2**30 == pytest.approx(gib, rel=0.1)


def test_runs_that_differ_in_their_overlap_alone_are_compiled_once():
    entries = [e for e in plan_table.entries(plan_table.SETTINGS[-2:-1]) if "baseline_overlap" in e.file]
    assert len(entries) == 27 and len({entry.key for entry in entries}) == len(plan_table.CHIPS_1)
