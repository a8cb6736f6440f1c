"""Plans the rows of the tables of Block-Recurrent Transformers, Shortformer and the recurrence of pretrained models.

    python benchmarks/plan_table.py --results=DIR

Compiles training steps alone, as `plan --quick` does, one after the other, a minute or two each. What the compiler
reports is added to DIR/results.json, from which the same command resumes. It then writes the tables of docs/planning.md
to DIR/table.md.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pandas as pd
from absl import app, flags

from meliad_like.config import RunConfig, parse, read_table
from meliad_like.errors import UserError
from meliad_like.planning import report
from meliad_like.planning.programs import estimates
from meliad_like.planning.topology import open_topology
from meliad_like.resumable import write_json
from meliad_like.run.setup import vocabulary_size
from meliad_like.tables import Table

RESULTS = flags.DEFINE_string("results", "runs/planning", "Folder of results.json and table.md.")
MATCH = flags.DEFINE_multi_string("match", [], "Compile only where row@topology contains all of these. Repeatable.")


class Setting(NamedTuple):
    """How the rows of a table are planned."""

    table: str
    options: tuple[str, ...]
    """Gin files in addition to each row."""
    topologies: tuple[str, ...]
    vocabulary_size: int | None
    """None: as the row says."""


# The paper's 32 replicas are the 32 cores of a v4-32, which JAX runs as 16 devices; others have GPUs.
CHIPS_1 = ("v4:1x1x1", "v5e:1x1", "v6e:1x1")
CHIPS_8 = ("v4:2x2x2", "v5e:2x4", "v6e:2x4")
CHIPS_16 = ("v4:2x2x4", "v5e:4x4", "v6e:4x4")
BFLOAT16 = "option/bfloat16.gin"
SETTINGS = (
    *(Setting(f"block_recurrent/{table}", (BFLOAT16,), CHIPS_16, 32_000) for table in ("table1", "table4", "table3")),
    Setting("block_recurrent/table5", (BFLOAT16,), CHIPS_16, None),
    *(Setting(f"shortformer/{table}", (), CHIPS_8, 267_744) for table in ("tables", "table9", "table11", "table12")),
    Setting("recurrent_pretrained/tables", ("pretrained/gpt2_small.gin",), CHIPS_1, 50_257),
)


class Entry(NamedTuple):
    """A run on a topology."""

    row: str
    run: RunConfig
    vocabulary_size: int
    topology: str

    @property
    def key(self) -> str:
        """Equal for all entries with the same program, which is then compiled once.

        The overlap of windows is left out: it decides which targets count, and not what is computed.
        """
        run = self.run
        model = dataclasses.asdict(run.model) | {"overlap": None}
        program = (
            type(run.model).__name__, model, self.vocabulary_size, run.data.num_lanes, run.data.segment_length,
            run.optimizer, run.training.gradient_accumulation, run.training.loss_slice, run.mesh, self.topology,
        )  # fmt: skip
        return hashlib.sha256(repr(program).encode()).hexdigest()[:16]


def entries(settings: Sequence[Setting] = SETTINGS) -> Iterator[Entry]:
    """All runs, table by table and, in a table, topology by topology."""
    for setting in settings:
        rows = [f"{setting.table}/{row}" for row in read_table(setting.table)]
        runs = {row: parse([row, *setting.options]) for row in rows}
        for topology in setting.topologies:
            for row, run in runs.items():
                yield Entry(row, run, setting.vocabulary_size or vocabulary_size(run), topology)


def compile_entry(entry: Entry) -> dict[str, Any]:
    """What a training step needs, as `plan --output` writes it; or the reason why there is no such step."""
    topology = open_topology(entry.topology)
    try:
        return report.to_json(list(estimates(entry.run, entry.vocabulary_size, topology, ("training",), quick=True)))
    except UserError as error:
        return {"error": str(error)}


def make_tables(entries: Sequence[Entry], results: dict[str, Any]) -> str:
    """Markdown: for each paper a table, with a line for the rows of one program and a column for each topology.

    Lines without a result are left out. A bold size does not fit. Arithmetic limits the time where no word follows it.
    """
    places = [(e.row.split("/")[0], e.row, e.topology, e.key) for e in entries]
    frame = pd.DataFrame(places, columns=["paper", "row", "topology", "key"])
    tables = []
    for paper, of_paper in frame.groupby("paper", sort=False):
        programs = of_paper.groupby("row", sort=False)["key"].agg(tuple)
        lines = [
            (
                ", ".join(f"`{row.removeprefix(f'{paper}/')}`" for row in rows.index),
                *(_cell(results.get(key)) for key in keys),
            )
            for keys, rows in programs.groupby(programs, sort=False)
            if results.keys() & set(keys)
        ]
        if lines:
            tables.append(Table("", (f"`{paper}`", *of_paper["topology"].unique()), lines).to_markdown())
    return "\n".join(tables)


def _cell(result: dict[str, Any] | None) -> str:
    if result is None:
        return "not compiled yet"
    if "error" in result:
        return "lanes don't divide"
    (estimate,) = result["programs"]
    size = f"{estimate['total'] / 2**30:.1f}"
    if not estimate["fits"]:
        return f"**{size}**"
    limit = "" if estimate["limited_by"] == "arithmetic" else f", {estimate['limited_by']}"
    return f"{size}; {1e3 * max(estimate['seconds'].values()):.0f} ms{limit}"


def make(folder: Path, words: Sequence[str]) -> None:
    """Compiles what has no result yet and has all of these words in `row@topology`; writes the tables."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    all_entries = list(entries())
    for entry in all_entries:
        name = f"{entry.row}@{entry.topology}"
        if entry.key not in results and all(word in name for word in words):
            print(name, flush=True)
            results[entry.key] = compile_entry(entry)
            write_json(path, results)
    (folder / "table.md").write_text(make_tables(all_entries, results))
    done = {entry.key for entry in all_entries}
    print(f"{len(done & results.keys())} of {len(done)} different programs are compiled; wrote {folder / 'table.md'}")


def main(_) -> None:
    # As in `plan`: the program itself runs on the CPU, whatever it compiles for.
    jax.config.update("jax_platforms", "cpu")
    make(Path(RESULTS.value), MATCH.value)


if __name__ == "__main__":
    app.run(main)
