"""`benchmarks/first_study.sh`, the study of hybrids at equal time, from its documents to its intervals in small."""

import json
import os
import random
import re
import signal
import subprocess
from pathlib import Path

import pandas as pd
import pytest

ROOT = Path(__file__).resolve().parent.parent
ROWS = ("slide_13l", "retention")
SECONDS_EACH = 0.2

SMALL = """
DecoderConfig.num_layers = 1
DecoderConfig.model_width = 16
DecoderConfig.num_heads = 2
DecoderConfig.head_size = 8
DecoderConfig.feedforward_width = 32
DecoderConfig.window_length = 16
ReaderConfig.segment_length = 16
ReaderConfig.tokens_per_step = 32
"""


@pytest.fixture
def study(tmp_path):
    """Starts the script, with all rows of `ROWS` on one device."""
    generator = random.Random(0)
    for number in range(20):
        package = tmp_path / "packages" / f"package_{number:02}"
        package.mkdir(parents=True)
        (package / "module.py").write_text("".join(generator.choices("abc \n", k=20_100 + number)))
    variables = {"ROWS": ",".join(ROWS), "SEEDS": "0", "SECONDS_EACH": f"{SECONDS_EACH}", "MINUTES": "30"}
    variables |= {"SIZE": "tiny", "PACKAGES": f"{tmp_path / 'packages'}"}
    variables["XLA_FLAGS"] = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"
    words = ["bash", "benchmarks/first_study.sh", tmp_path / "study", "--repeats=3", "--max_tokens=2000"]
    words += [f"--gin_param={binding}" for binding in SMALL.strip().splitlines()]

    def start() -> subprocess.Popen:
        # In a group of its own, as a shell starts it, so that Ctrl-C can be sent to all of its processes.
        outputs = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen(words, cwd=ROOT, env={**os.environ, **variables}, process_group=0, **outputs)

    return start


def interrupt_at(study: subprocess.Popen, line: str) -> str:
    """Sends Ctrl-C when the study has printed this line. Returns all its output."""
    assert study.stdout is not None
    output = ""
    for printed in study.stdout:
        output += printed
        if printed.startswith(line):
            os.killpg(study.pid, signal.SIGINT)
    return output


@pytest.mark.thorough
def test_a_study_resumes_with_the_next_row_and_gives_its_rows_equal_time(study, tmp_path):
    folder = tmp_path / "study" / "runs"
    timing, *tests = folder / "step_time.json", *(folder / f"{row}-0" / "test.json" for row in ROWS)
    interrupted = study()
    output = interrupt_at(interrupted, f"{ROWS[1]}-0, 1 of 1")
    # Ended by the signal, or by a program that was.
    assert interrupted.wait() in (-signal.SIGINT, 128 + signal.SIGINT), output
    assert [path.exists() for path in tests] == [True, False]
    modified = [path.stat().st_mtime_ns for path in (timing, tests[0])]

    resumed = study()
    output, _ = resumed.communicate()
    assert resumed.returncode == 0, output
    assert re.findall("(.*), 1 of 1 that are not finished", output) == [f"{ROWS[1]}-0"]
    assert [path.stat().st_mtime_ns for path in (timing, tests[0])] == modified

    table = pd.read_csv(folder / "mixers.csv", index_col="row")
    assert list(table.index) == list(ROWS)
    for row in ROWS:
        step = table.milliseconds[row] / 1000
        num_steps = json.loads((folder / f"{row}-0" / "result.json").read_text())["num_steps"]
        assert 0 <= round(SECONDS_EACH / step - num_steps, 6) < 1
        assert f"== {row}, seed 0: {num_steps} steps\n" in output
    difference = table.bits_per_byte[ROWS[1]] - table.bits_per_byte[ROWS[0]]
    assert table.difference[ROWS[1]] == pytest.approx(difference)
    assert f"| RetNet | {table.parameters[ROWS[1]]:,.0f} | 256 | {table.bits_per_byte[ROWS[1]]:.4f} |" in output
    intervals = output.split(f"== {ROWS[1]} against {ROWS[0]}\n")[1]
    assert f"difference {difference:+.4f}, 95% interval " in intervals
    assert re.search(r"better in [012] of 2 documents\n$", intervals)
