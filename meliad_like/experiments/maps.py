"""The memory maps of a table's rows, each of all seeds together: Markdown, CSV and a picture."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from meliad_like.config import RunConfig
from meliad_like.errors import UserError
from meliad_like.experiments.report import Results, scores_file
from meliad_like.experiments.tables import Row, Settings
from meliad_like.remote import write_whole
from meliad_like.studies.map_tables import accuracies, by_distance, by_model, summary, summary_table, tables
from meliad_like.studies.memory_source import MemoryTasksSource
from meliad_like.studies.pictures import draw_map, save

PANELS_IN_ROW = 3


def write_maps(results: Results, run: RunConfig, settings: Settings, seeds: Iterable[int], path: Path) -> str:
    """Writes the rows' maps as `path` with the suffix `.png` and as `_cells.csv`; returns their Markdown.

    `run` is that of a row. Raises a UserError if its documents are others.
    """
    if not isinstance(run.source, MemoryTasksSource):
        raise UserError(f"{results.table.name} needs the documents of memory_tasks: leave out --task")
    maps = gather_maps(results.rows, settings.folder, seeds, settings.split)
    draw_maps(maps, path.with_suffix(".png"))
    write_whole(path.with_name(f"{path.name}_cells.csv"), by_model(maps).to_csv(index=False))
    return maps_to_markdown(maps, run.source.block_length)


def gather_maps(rows: Iterable[Row], folder: Path, seeds: Iterable[int], split: str) -> dict[str, pd.DataFrame]:
    """The cells of each row that has results, by its label; the answers of its seeds are counted together."""
    seeds, maps = tuple(seeds), {}
    for row in rows:
        files = (scores_file(folder, row, seed, split) for seed in seeds)
        documents = [score for file in files if file.exists() for score in json.loads(file.read_text())["documents"]]
        if documents:
            answers = ((score["name"], score["num_tokens"], score["num_correct"]) for score in documents)
            maps[row.label] = accuracies(answers)
    return maps


def maps_to_markdown(maps: Mapping[str, pd.DataFrame], block_length: int) -> str:
    """All rows side by side, each row's map, then how much it holds and how far."""
    totals = by_model({label: summary(cells, block_length) for label, cells in maps.items()})
    return "\n".join(table.to_markdown() for table in (by_distance(maps), *tables(maps), summary_table(totals)))


def draw_maps(maps: Mapping[str, pd.DataFrame], path: Path) -> None:
    """Draws the map of each row and task, from white, chance, to dark, all answers right."""
    groups = [(label, *group) for label, cells in maps.items() for group in cells.groupby("task", sort=False)]
    num_rows = -(-len(groups) // PANELS_IN_ROW)
    picture = Figure(figsize=(4.4 * PANELS_IN_ROW, 3.2 * num_rows), dpi=120, layout="constrained")
    panels = np.atleast_1d(picture.subplots(num_rows, PANELS_IN_ROW)).ravel()
    for axes in panels[len(groups) :]:
        axes.remove()
    for axes, (label, task, cells) in zip(panels, groups):
        grid = cells.pivot(index="items", columns="distance", values="accuracy")
        draw_map(axes, grid, cells.chance.iloc[0])
        axes.set(xlabel="blocks of filler", ylabel="items", title=f"{label}: {task}")
    save(picture, path)
