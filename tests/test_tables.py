"""Tables of text and numbers, for the terminal and for Markdown."""

import io
import math

import pandas as pd
from rich.console import Console

from meliad_like.studies.frames import number, signed, table_of, with_error
from meliad_like.tables import Table

FRAME = pd.DataFrame({"model": ["Slide", "[b]XL & co"], "bits": [1.25, math.nan], "steps": [12_000, 3]})


def test_markdown_of_a_frame():
    table = table_of(FRAME, "Two models", {"bits": ".3f", "steps": ","})
    assert table.to_markdown() == (
        "Two models\n\n| model | bits | steps |\n| --- | ---: | ---: |\n"
        "| Slide | 1.250 | 12,000 |\n| [b]XL & co | - | 3 |\n"
    )
    assert Table("", ("a",), [("b",)]).to_markdown() == "| a |\n| --- |\n| b |\n"


def test_a_console_shows_text_as_it_is():
    console = Console(width=60, file=io.StringIO())
    console.print(table_of(FRAME, "[i]title").to_rich())
    shown = console.file.getvalue()
    assert "[i]title" in shown and "[b]XL & co" in shown and "1.25" in shown


def test_numbers_that_are_missing():
    assert [number(value, ".1f") for value in (None, math.inf, math.nan, "text", 2)] == ["-", "-", "-", "text", "2.0"]
    assert with_error(1.5, 0.25, ".2f") == "1.50 ± 0.2500" and with_error(1.5, math.nan, ".2f") == "1.50"


def test_a_sign_is_a_minus():
    assert [signed(value, 2) for value in (-1234.5, 0.125, math.nan)] == ["−1,234.50", "+0.12", "−"]
