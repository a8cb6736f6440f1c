"""The notebook's cells run from the first to the last, and it is kept with outputs."""

import json
import re
from pathlib import Path

import forked
import pytest
from tiny_run import environment

NOTEBOOKS = sorted((Path(__file__).parent.parent / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
@pytest.mark.thorough
def test_it_runs(path, tmp_path):
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    code = "\n".join("".join(cell["source"]) for cell in cells)
    # A training of any length shows that the cells run.
    code, replaced = re.subn("num_steps = 300", "num_steps = 6", code)
    assert replaced == 1
    result = forked.Process(["-c", code], environment(1) | {"MPLBACKEND": "agg"}, tmp_path).finish()
    assert result.returncode == 0, result.stderr
    assert "bits per byte" in result.stdout and "--- 2 ---" in result.stdout
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), "run it, and save its outputs"
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell["outputs"])
