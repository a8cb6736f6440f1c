"""The wheel alone, in a fresh virtual environment and an empty folder."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

TRAINING = ["--gin_file=quickstart.gin", "--gin_param=TrainingConfig.num_steps = 2"]
FIVE_LINES = """
    import meliad_like

    lm = meliad_like.load("runs/quickstart")
    print(lm.score("some text").bits_per_byte)
    book = lm.read(open("book.txt").read())
    print(lm.generate(book, tokens=200, temperature=0.7))
    book.save("book.npz"); print(lm.resume("book.npz"))
"""
FIRST_TOKEN = """
    import time
    began = time.perf_counter()
    import meliad_like
    imported = time.perf_counter() - began
    next(meliad_like.load("runs/quickstart").stream("import os", chunk=1))
    seconds = time.perf_counter() - began
    print(f"import meliad_like: {imported:.3f} s; first token: {seconds:.1f} s, {time.process_time():.1f} s of CPU")
"""


@pytest.mark.exhaustive
def test_five_lines(built, tmp_path, capsys):
    """Installs all requirements from the package index, which takes minutes."""
    _, wheel = built
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python, folder = tmp_path / "venv" / "bin" / "python", tmp_path / "empty"
    folder.mkdir()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "XLA_", "JAX_"))}

    def run(*words: str | Path) -> str:
        result = subprocess.run([python, *words], cwd=folder, env=environment, capture_output=True, text=True)
        assert result.returncode == 0, f"{words}\n{result.stdout}\n{result.stderr}"
        return result.stdout

    run("-m", "pip", "install", "--quiet", wheel)
    run("-m", "meliad_like.prepare", *TRAINING)
    run("-m", "meliad_like.train", *TRAINING, "--workdir=runs/quickstart")
    (folder / "book.txt").write_text("A book of one line.\n" * 100)
    run("-c", textwrap.dedent(FIVE_LINES))
    assert (folder / "book.npz").exists()
    with capsys.disabled():
        print(f"\n{run('-c', textwrap.dedent(FIRST_TOKEN))}", end="")
