"""Every block of code on the documentation's pages is run with small models, or a comment above it says why not:

<!-- not run: REASON -->                 what it needs is not here
<!-- run by test_file.py::test_name -->  another test runs it
<!-- part of PATH -->                    its lines are in this file
<!-- run before a release -->            pytest -m exhaustive
"""

import ast
import re
import shlex
import sysconfig
import textwrap
from pathlib import Path
from typing import NamedTuple

import forked
import pytest
from pages import PAGES, ROOT
from tiny_run import environment

BLOCK = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*) -->\n\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
MARKS = {
    "not run": r"not run: (?P<reason>\w.{10,})",
    "run by": r"run by (?P<file>test_\w+\.py)::(?P<test>\w+)",
    "part of": r"part of (?P<path>[\w./]+)",
    "exhaustive": "run before a release",
}
# For trainings; the last --gin_param wins.
SMALL = [
    "DecoderConfig.num_layers = 1",
    "DecoderConfig.model_width = 32",
    "DecoderConfig.num_heads = 2",
    "DecoderConfig.head_size = 16",
    "DecoderConfig.feedforward_width = 32",
    "DecoderConfig.window_length = 16",
    "ReaderConfig.segment_length = 32",
    "ReaderConfig.tokens_per_step = 128",
    "TrainingConfig.num_steps = 4",
    "TrainingConfig.evaluate_every = 0",
]
# Of a recurrent layer; nothing reads them without one.
SMALL_RECURRENCE = ["RECURRENT_LAYERS = (-1,)", "NUM_STATES = 8"]
WITHOUT_RECURRENCE = {"/slide_": [], "own_documents.gin": ["DecoderConfig.num_layers = 3"]}
# A command, after `python -c`, with some packages of the standard library in the place of all.
COMMAND = """
import runpy, sys, sysconfig
paths = sysconfig.get_paths
sysconfig.get_paths = lambda *arguments: paths(*arguments) | {"stdlib": "standard_library"}
sys.argv = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


# Of README.md, CONTRIBUTING.md and docs/ together.
MOST_WORDS = 19_500


class Block(NamedTuple):
    page: Path
    line: int
    mark: str
    language: str
    code: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks() -> list[Block]:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start("language")) + 1
            found.append(Block(page, line, match["mark"] or "", match["language"], match["code"]))
    return found


BLOCKS = blocks()


def marked(kind: str) -> list[tuple[Block, re.Match]]:
    found = [(block, re.fullmatch(MARKS[kind], block.mark)) for block in BLOCKS]
    return [(block, match) for block, match in found if match]


def test_every_block_has_a_language_and_a_known_mark():
    for block in BLOCKS:
        assert block.language in ("bash", "python", "text"), f"{block.name}: ```bash, ```python or ```text"
        known = not block.mark or any(re.fullmatch(mark, block.mark) for mark in MARKS.values())
        assert known, f"{block.name}: {block.mark}; {__doc__}"
    for page in PAGES:
        lines = re.sub(r"(?ms)^```.*?^```$", "", page.read_text())
        assert "```" not in lines, f"{page.name}: a block that is not closed"
        # Lists are indented, too.
        indented = re.search(r"(?m)\n\n {4}(?! )(?![-*\d]).*$", lines)
        assert indented is None or re.search(r"(?m)^(\d+\.|[-*]) ", lines), (
            f"{page.name}: {indented[0]!r} is not fenced"
        )


def test_examples_in_docstrings_are_indented():
    """The reference shows other lines as a paragraph."""
    for path in (ROOT / "meliad_like").rglob("*.py"):
        docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
        assert not re.search(r"(?m)^(import \w|\w+ = |\w[\w.]*\(.*\)$)", docstring), path


def test_docstrings_stand_alone():
    """Their first lines, also those of fields, are sentences or noun phrases, and do not end the line above them."""
    for path in (ROOT / "meliad_like").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                fragment = re.match(r"(Of|Whose|That|Those) .*", node.value.value)
                assert fragment is None, f"{path.relative_to(ROOT)}:{node.lineno}: {fragment[0]}"


def test_the_pages_are_short():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    assert sum(len(page.read_text().split()) for page in pages) <= MOST_WORDS


@pytest.mark.parametrize(("block", "match"), marked("run by"), ids=lambda value: getattr(value, "name", ""))
def test_other_tests_run_it(block, match):
    assert f"def {match['test']}(" in (ROOT / "tests" / match["file"]).read_text()


@pytest.mark.parametrize(("block", "match"), marked("part of"), ids=lambda value: getattr(value, "name", ""))
def test_its_lines_are_in_the_file(block, match):
    source = {line.strip() for line in (ROOT / match["path"]).read_text().splitlines()}
    for line in block.code.splitlines():
        assert line.strip().removesuffix(" ...") in source | {"..."}, line


@pytest.fixture(scope="session")
def place(tmp_path_factory) -> Path:
    """A folder with what the pages suppose: documents, texts, and the quick start's model, trained for a few steps."""
    folder = tmp_path_factory.mktemp("docs")
    library = Path(sysconfig.get_paths()["stdlib"])
    for name in ("asyncio", "email", "http", "json", "logging", "urllib"):
        # Long ones for training, of which the vocabulary is learned.
        text = "".join(path.read_text() for path in sorted((library / name).glob("*.py")))
        (folder / "standard_library" / name).mkdir(parents=True)
        (folder / "standard_library" / name / "__init__.py").write_text(
            text[: None if name in ("asyncio", "email") else 3000]
        )
    for path in ("my_books/train/one", "my_books/validation/two", "my_books/test/three", "my_texts/test/one"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).with_suffix(".txt").write_text(f"a line of {path}\n" * 60)
    (folder / "my_books/train/long.txt").write_text((folder / "standard_library/asyncio/__init__.py").read_text())
    (folder / "book.txt").write_text("a line of a book\n" * 60)
    (folder / "setup.py").write_text("import os\n" * 20)
    run_bash("python -m meliad_like.prepare --gin_file=quickstart.gin", folder)
    run_bash("python -m meliad_like.train --gin_file=quickstart.gin --workdir=runs/quickstart", folder)
    return folder


def run_bash(code: str, folder: Path) -> None:
    """Runs the lines of a block, each of which is a comment or a command of the package."""
    for line in textwrap.dedent(code).replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if not words:
            continue
        variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
        python, dash_m, module, *arguments = words[len(variables) :]
        assert (python, dash_m) == ("python", "-m"), f"only commands of the package can be run here: {line}"
        if module == "meliad_like.train":
            more = next((more for name, more in WITHOUT_RECURRENCE.items() if name in line), SMALL_RECURRENCE)
            arguments += [f"--gin_param={binding}" for binding in SMALL + more]
        process = forked.Process(["-c", COMMAND, module, *arguments], environment(1) | variables, folder)
        result = process.finish()
        assert result.returncode == 0, f"{line}\n{result.stdout}\n{result.stderr}"


def to_run() -> list:
    return [
        pytest.param(block, marks=[pytest.mark.exhaustive] * bool(block.mark), id=block.name)
        for block in BLOCKS
        if block.language != "text" and block.mark in ("", MARKS["exhaustive"])
    ]


@pytest.mark.parametrize("block", to_run())
def test_block(block, place, monkeypatch):
    if block.language == "bash":
        run_bash(block.code, place)
    else:
        monkeypatch.chdir(place)
        exec(compile(block.code, block.name, "exec"), {"__name__": "__main__"})
