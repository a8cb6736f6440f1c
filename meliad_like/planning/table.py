"""Would the papers' runs fit? Plans every gin file of a paper's table, and writes the table of docs/planning.md.

    nice python -m meliad_like.planning.table

Training steps alone are compiled, as by `plan --quick`, one after the other, a minute or two each. What the compiler
says goes into `--results` at once, and is not asked again: so the command goes on where it was stopped, and what isn't
there yet is shown as such.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from absl import flags

from meliad_like import command_line
from meliad_like.config import RunConfig, parse
from meliad_like.config.search import shipped_files
from meliad_like.errors import UserError
from meliad_like.remote import write_whole

RESULTS = flags.DEFINE_string("results", "docs/planning.json", "What was compiled, and is not compiled again.")
PAGE = flags.DEFINE_string("page", "docs/planning.md", "The page whose table is written anew.")
MATCH = flags.DEFINE_multi_string("match", [], "Compile only where file@topology has these words.")
COMPILE = flags.DEFINE_bool("compile", True, "Whether to compile what is not there yet.")

BEGIN, END = "<!-- the table begins -->", "<!-- the table ends -->"


class Setting(NamedTuple):
    """How the files of a folder are planned."""

    folder: str
    others: tuple[str, ...]
    """Gin files beside each."""
    topologies: tuple[str, ...]
    vocabulary_size: int | None
    """None: as the file says."""
    parts: tuple[str, ...] = ()
    """Files that are no run."""


# The paper's 32 replicas are the 32 cores of a v4-32, which JAX runs as 16 devices; others have GPUs.
CHIPS_1 = ("v4:1x1x1", "v5e:1x1", "v6e:1x1")
CHIPS_8 = ("v4:2x2x2", "v5e:2x4", "v6e:2x4")
CHIPS_16 = ("v4:2x2x4", "v5e:4x4", "v6e:4x4")
BFLOAT16 = "option/bfloat16.gin"
SETTINGS = (
    Setting("block_recurrent", (BFLOAT16,), CHIPS_16, 32_000),
    Setting("block_recurrent/table4", (BFLOAT16,), CHIPS_16, 32_000),
    Setting("block_recurrent/table3", (BFLOAT16,), CHIPS_16, 32_000),
    Setting("block_recurrent/table5", (BFLOAT16,), CHIPS_16, None),
    Setting("shortformer", (), CHIPS_8, 267_744, parts=("protocol", "book_corpus")),
    *(Setting(f"shortformer/table{number}", (), CHIPS_8, 267_744) for number in (1, 2, 3, 4, 9, 11, 12)),
    Setting("shortformer/unequal", (), CHIPS_8, 267_744),
    Setting("recurrent_pretrained/tables", ("pretrained/gpt2_small.gin",), CHIPS_1, 50_257),
    Setting("recurrent_pretrained/figures", ("pretrained/gpt2_small.gin",), CHIPS_1, 50_257),
)


class Entry(NamedTuple):
    """A run on a topology."""

    file: str
    run: RunConfig
    vocabulary_size: int
    topology: str

    @property
    def key(self) -> str:
        """The same for all that compile to the same program, and need not be compiled twice.

        Fields with their defaults are left out, so that a new one, whose default is what there was before, leaves the
        keys as they are. Where a default changes its meaning, `docs/planning.json` must begin anew. How much windows
        overlap is left out too: it decides which targets count, and changes nothing that is shown.
        """
        run = self.run
        model = _not_default(run.model)
        model.pop("overlap", None)
        said = {
            "model": [type(run.model).__name__, model],
            "vocabulary_size": self.vocabulary_size,
            "lanes": [run.data.num_lanes, run.data.segment_length],
            "optimizer": _not_default(run.optimizer),
            "parts": [run.training.gradient_accumulation, run.training.loss_slice],
            "mesh": _not_default(run.mesh),
            "topology": self.topology,
        }
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]


def _not_default(config: Any) -> dict[str, Any]:
    default = dataclasses.asdict(type(config)())
    return {name: value for name, value in dataclasses.asdict(config).items() if value != default[name]}


def entries(settings: Sequence[Setting] = SETTINGS) -> Iterator[Entry]:
    """All of the table, folder by folder and, in a folder, topology by topology."""
    from meliad_like.run.setup import vocabulary_size

    for setting in settings:
        files = [path for path in map(Path, shipped_files()) if path.parent == Path(setting.folder)]
        files = [path.as_posix() for path in files if path.stem not in setting.parts]
        runs = {file: parse([file, *setting.others]) for file in files}
        for topology in setting.topologies:
            for file, run in runs.items():
                yield Entry(file, run, setting.vocabulary_size or vocabulary_size(run), topology)


def compile_entry(entry: Entry) -> dict[str, Any]:
    """What a training step needs, as `plan --output` writes it; or why it can't be."""
    from meliad_like.planning import report
    from meliad_like.planning.programs import needs
    from meliad_like.planning.topology import describe

    topology = describe(entry.topology)
    try:
        found = list(needs(entry.run, entry.vocabulary_size, topology, ("training",), quick=True))
    except UserError as error:
        return {"error": str(error)}
    return report.to_json(found, topology)


def write_table(entries: Sequence[Entry], results: dict[str, Any]) -> str:
    """A table for each paper's folder: a column a topology, and a row for the files that are the same program.

    Rows of which nothing is known are left out, and counted below.
    """
    by_file: dict[str, list[Entry]] = {}
    for entry in entries:
        by_file.setdefault(entry.file, []).append(entry)
    rows: dict[tuple[str, ...], list[list[Entry]]] = {}
    for row in by_file.values():
        rows.setdefault(tuple(entry.key for entry in row), []).append(row)
    lines, header = [], None
    for keys, same in rows.items():
        if not results.keys() & set(keys):
            continue
        paper = same[0][0].file.split("/")[0]
        names = ", ".join(f"`{row[0].file.removeprefix(f'{paper}/').removesuffix('.gin')}`" for row in same)
        columns = [entry.topology for entry in same[0]]
        if header != (header := f"| `{paper}` | {' | '.join(columns)} |"):
            lines += ["", header, "|---" * (1 + len(columns)) + "|"]
        lines.append(f"| {names} | {' | '.join(_cell(results.get(key)) for key in keys)} |")
    wanted = {key for keys in rows for key in keys}
    there = len(wanted & results.keys())
    left_out = "" if there == len(wanted) else "; rows of which nothing is known are left out"
    lines += ["", f"{there} of {len(wanted)} different programs have been compiled{left_out}."]
    return "\n".join(lines[1:])


def _cell(result: dict[str, Any] | None) -> str:
    if result is None:
        return "not compiled yet"
    if "error" in result:
        return "lanes don't divide"
    (need,) = result["programs"]
    size = f"{need['total'] / 2**30:.1f}"
    if not need["fits"]:
        return f"**{size}**, does not fit"
    return f"{size}; {1e3 * max(need['seconds'].values()):.0f} ms, {need['limited_by']}"


def make(place: Path, page: Path, words: Sequence[str], compiling: bool = True) -> None:
    """Compiles what is not there yet, and writes the page's table anew.

    Args:
      place: JSON file of results by `Entry.key`; it need not be there.
      page: has the lines BEGIN and END.
      words: which are compiled: those with all of these words in `file@topology`.
      compiling: False: none.
    """
    results = json.loads(place.read_text()) if place.exists() else {}
    wanted = list(entries())
    for entry in wanted if compiling else ():
        name = f"{entry.file}@{entry.topology}"
        if entry.key in results or not all(word in name for word in words):
            continue
        print(name, flush=True)
        results[entry.key] = compile_entry(entry)
        write_whole(place, json.dumps(results, indent=1, sort_keys=True) + "\n")
    text = page.read_text()
    begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    write_whole(page, f"{text[:begin]}\n{write_table(wanted, results)}\n{text[end:]}")


def main() -> None:
    # As in `plan`: the program itself runs on the CPU, whatever it compiles for.
    jax.config.update("jax_platforms", "cpu")
    make(Path(RESULTS.value), Path(PAGE.value), MATCH.value, COMPILE.value)


if __name__ == "__main__":
    command_line.run(main)
