"""The search for history_length and span_length (section 3 of Ancient History Language Models)."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from meliad_like.data.readers import label
from meliad_like.errors import UserError
from meliad_like.history import report
from meliad_like.history.commands import CONTROLS, evaluate_resumably
from meliad_like.history.evaluation import BASELINE
from meliad_like.history.opening import HistoryRequest
from meliad_like.history.selection import Ranking, ScoreOracle
from meliad_like.history.spans import HistoryConfig
from meliad_like.tables import Table


def search(request: HistoryRequest, folder: Path, history_lengths: Sequence[int], span_lengths: Sequence[int]) -> None:
    """Evaluates the score oracle and the controls at all pairs of lengths that fit together.

    Args:
        request: the model and the documents; the paper searches on training documents.
        folder: folder of search.json, search.md, and of what is finished of each pair.
        history_lengths, span_lengths: values of `HistoryConfig.history_length` and of `span_length`.

    Raises:
        UserError: no pair fits.
    """
    opened = request.open()
    windows, model, found = opened.windows(), opened.fingerprint, []
    for lengths in ((history, span) for history in history_lengths for span in span_lengths):
        row = dict(zip(("history_length", "span_length"), lengths))
        title = ", ".join(f"{name}={value}" for name, value in row.items())
        try:
            config = dataclasses.replace(opened.config, **row)
        except UserError as error:
            found.append({**row, "why_not": str(error)})
            continue
        chosen = [*(Ranking(name, config) for name in CONTROLS), ScoreOracle(opened.gains(config), model)]
        part = folder / f"history{lengths[0]}_span{lengths[1]}"
        evaluation = evaluate_resumably(opened, windows, chosen, config, part, title)
        bootstrap = report.Bootstrap(len(evaluation.documents))
        figures = {
            name: dataclasses.asdict(report.figures(evaluation, name, bootstrap)["perplexity"])
            | {"leaks_the_future": leaks}
            for name, leaks in evaluation.selections.items()
        }
        found.append({**row, **figures})
        values = (f"{label(name, each['leaks_the_future'])} {each['value']:.4f}" for name, each in figures.items())
        print(f"{title}: {', '.join(values)}")
    tables = search_tables(found, history_lengths, span_lengths, opened.config)
    for table in tables:
        Console().print(table.to_rich())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "search.json").write_text(json.dumps(found, indent=2) + "\n")
    (folder / "search.md").write_text("\n".join(table.to_markdown() for table in tables))
    print(f"wrote {folder / 'search.md'} and search.json")


def search_tables(
    found: Sequence[dict], history_lengths: Sequence[int], span_lengths: Sequence[int], config: HistoryConfig
) -> list[Table]:
    """The perplexity by both lengths: of the score oracle, with its best pair marked, and of the controls.

    Raises:
        UserError: no pair of lengths fits.
    """
    fitting = {(row["history_length"], row["span_length"]): row for row in found if "why_not" not in row}
    if not fitting:
        raise UserError(f"none of these lengths fits: {found[0]['why_not']}")
    first = next(iter(fitting.values()))
    best = min(fitting, key=lambda pair: fitting[pair][report.ORACLE]["value"])

    def table(name: str) -> Table:
        def cell(pair: tuple[int, int]) -> str:
            if pair not in fitting:
                return "-"
            return f"{fitting[pair][name]['value']:.4f}" + (" *" if name == report.ORACLE and pair == best else "")

        rows = [
            (f"history_length = {history}", *(cell((history, span)) for span in span_lengths))
            for history in history_lengths
        ]
        title = (
            f"perplexity per token, {label(name, first[name]['leaks_the_future'])}; baseline "
            f"{first[BASELINE]['value']:.4f}, window {config.window_length}, stride {config.stride}; "
            f"{'*: the best, ' if name == report.ORACLE else ''}-: does not fit{report.among(config.max_candidates)}"
        )
        return Table(title, ("", *(f"span_length = {span}" for span in span_lengths)), rows)

    return [table(name) for name in (report.ORACLE, *CONTROLS)]
