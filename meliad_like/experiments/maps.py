"""The memory maps of a table's rows, each of all seeds together: Markdown, CSV and a picture."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from meliad_like.config import RunConfig
from meliad_like.errors import UserError
from meliad_like.experiments.report import Results, scores_file
from meliad_like.experiments.tables import Row, Settings
from meliad_like.remote import write_whole
from meliad_like.resumable import read_json
from meliad_like.studies.frames import table_of
from meliad_like.studies.memory_map import SUMMARY_FORMATS, accuracies, blocks, by_model, grids, summary
from meliad_like.studies.memory_source import MemoryTasksSource
from meliad_like.studies.pictures import draw_map, save

PANELS_IN_ROW = 3


def write_maps(results: Results, run: RunConfig, settings: Settings, seeds: Iterable[int], path: Path) -> str:
    """Writes the rows' maps as `path` with the suffix `.png` and as `_cells.csv`; returns their Markdown. UserError if
    the documents of `run`, which is that of a row, are others."""
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
        documents = [score for file in files if file.exists() for score in read_json(file)["documents"]]
        if documents:
            maps[row.label] = accuracies((doc["name"], doc["num_tokens"], doc["num_correct"]) for doc in documents)
    return maps


def maps_to_markdown(maps: Mapping[str, pd.DataFrame], block_length: int) -> str:
    """The share of right answers by distance, of all rows side by side; each row's map; how much it holds, how far."""
    sums = {label: cells.groupby("distance")[["correct", "questions"]].sum() for label, cells in maps.items()}
    shares = pd.DataFrame({label: each.correct / each.questions for label, each in sums.items()}).sort_index().T
    shares.columns = [*map(blocks, shares.columns)]
    formats = dict.fromkeys(shares.columns, ".2f")
    totals = by_model({label: summary(cells, block_length) for label, cells in maps.items()})
    tables = [
        table_of(shares.reset_index(names="model"), "Right answers by distance", formats),
        *(table_of(grid, title) for title, grid in grids(maps).items()),
        table_of(totals, formats=SUMMARY_FORMATS),
    ]
    return "\n".join(table.to_markdown() for table in tables)


def draw_maps(maps: Mapping[str, pd.DataFrame], path: Path) -> None:
    """Draws the map of each row and task, from white, chance, to dark, all answers right."""
    groups = [(label, *group) for label, cells in maps.items() for group in cells.groupby("task", sort=False)]
    num_rows = -(-len(groups) // PANELS_IN_ROW)
    picture = Figure(figsize=(4.4 * PANELS_IN_ROW, 3.2 * num_rows), dpi=120, layout="constrained")
    panels = picture.subplots(num_rows, PANELS_IN_ROW).ravel()
    for axes in panels[len(groups) :]:
        axes.remove()
    for axes, (label, task, cells) in zip(panels, groups):
        grid = cells.pivot(index="items", columns="distance", values="accuracy")
        draw_map(axes, grid, cells.chance.iloc[0])
        axes.set(xlabel="blocks of filler", ylabel="items", title=f"{label}: {task}")
    save(picture, path)
