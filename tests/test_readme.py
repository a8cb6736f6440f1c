"""The commands, gin files, links and paths in the README and the other pages exist."""

import csv
import json
import re
import shlex
import textwrap
from pathlib import Path

import forked
import pytest
from pages import PAGES, ROOT

from meliad_like import config
from meliad_like.config import files

# Parses the flags of the commands, without running them.
PARSE = """
import importlib.util, json, sys
for name, commands in json.loads(sys.argv[1]).items():
    is_package = importlib.util.find_spec(name).submodule_search_locations
    flags = importlib.import_module(name + (".__main__" if is_package else "")).COMMAND.flags
    for argv in commands:
        flags.unparse_flags()
        flags([name, *argv])
"""


def commands() -> dict[str, list[list[str]]]:
    """Arguments of the commands on these pages, by entry point."""
    found: dict[str, list[list[str]]] = {}
    text = "\n\n".join(page.read_text() for page in PAGES)
    fenced = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    indented = re.findall(r"(?:^    .*\n)+", re.sub(r"(?s)```.*?```", "", text), re.MULTILINE)
    for block in [*fenced, *map(textwrap.dedent, indented)]:
        if "python -m" not in block:
            continue
        variables: dict[str, str] = {}
        for line in block.replace("\\\n", " ").splitlines():
            for name, value in variables.items():
                line = line.replace(f"${name}", value)
            if assignment := re.fullmatch(r'([A-Z_]+)="(.*)"', line):
                variables[assignment[1]] = assignment[2]
            elif loop := re.match(r"for (\w+) in (\w+)", line):
                variables[loop[1]] = loop[2]
            words = shlex.split(line, comments=True)
            if "meliad_like" in line and "-m" in words and "..." not in words:
                module, *arguments = words[words.index("-m") + 1 :]
                found.setdefault(module, []).append(arguments)
    return found


COMMANDS = commands()


def test_every_entry_point_is_shown():
    shown = {name.removeprefix("meliad_like.") for name in COMMANDS}
    assert shown == {
        "prepare",
        "train",
        "evaluate",
        "generate",
        "convert",
        "plot",
        "plan",
        "studies",
        "experiments",
        "history",
        "describe",
        "harness",
    }


def test_flags_exist():
    result = forked.run("-c", PARSE, json.dumps(COMMANDS))
    assert result.returncode == 0, result.stderr


# Commands for a checkpoint change its config; the others describe a whole run.
@pytest.mark.parametrize("words", [*COMMANDS["meliad_like.train"], *COMMANDS["meliad_like.prepare"]], ids=" ".join)
def test_gin_files_and_parameters_make_a_run(words):
    def values(flag):
        return [word.partition("=")[2] for word in words if word.startswith(f"--{flag}=")]

    config.parse(values("gin_file"), values("gin_param"))


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of the page's headings."""
    headings = re.findall(r"(?m)^#+ (.*)$", page.read_text())
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_named_files_exist(page):
    text = page.read_text()
    for link, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", text):
        target = page.parent / link if link else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), f"{link}#{anchor}"
    for name in re.findall(r"`(\w+(?:/\w+)+\.gin)`", text):
        files.find(name.removeprefix("gin/"))
    for name in re.findall(r"`((?:meliad_like|docs|tests|benchmarks|launch)/[\w./]*)`", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", text):
        assert name[1] in (ROOT / "tests" / name[0]).read_text(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_are_whole(page):
    """A blank line inside a table would end it, and leave the lines below it as text."""
    for block in re.split(r"\n\s*\n", page.read_text()):
        lines = block.strip().splitlines()
        if lines and lines[0].lstrip().startswith("|"):
            assert re.fullmatch(r"\s*\|[-:| ]+\|", lines[1]), block


RESULTS = ROOT / "benchmarks" / "results"


def numbers(text: str) -> set[str]:
    """The numbers of a text that have at least three digits, without the commas of thousands."""
    written = re.findall(r"\d+(?:\.\d+)?", re.sub(r"(?<=\d),(?=\d{3})", "", text))
    return {number for number in written if len(number.replace(".", "")) > 2}


def test_every_measurement_is_described_and_whole():
    described = set(re.findall(r"`(\w+\.csv)`", (RESULTS / "README.md").read_text()))
    assert described == {path.name for path in RESULTS.glob("*.csv")}
    for path in RESULTS.glob("*.csv"):
        rows = list(csv.reader(path.read_text().splitlines()))
        assert len({len(row) for row in rows}) == 1, path.name
        assert len(set(rows[0])) == len(rows[0]), path.name


@pytest.mark.parametrize("name", ["results", "recurrence_study", "tpu_performance", "performance", "planning"])
def test_measurements_on_a_page_are_those_of_the_files(name):
    files = [list(csv.reader(path.read_text().splitlines())) for path in RESULTS.glob("*.csv")]
    measured = numbers("\n".join(cell for rows in files for row in rows for cell in row))
    page = (ROOT / "docs" / f"{name}.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("|")]
    cells = [cell for row in rows for cell in row.split("|")[2:]]
    assert cells and not numbers("\n".join(cells)) - measured
    assert all((RESULTS / file).exists() for file in re.findall(r"`(\w+\.csv)`", page))
