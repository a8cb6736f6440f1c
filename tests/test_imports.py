"""What may import what: a layer stands alone, and a model needs no trainer."""

import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "meliad_like"


@pytest.mark.parametrize(
    ("part", "allowed"),
    [("layers", {"errors", "layers"}), ("models", {"data", "errors", "layers", "models", "registry", "validation"})],
)
def test_what_is_below_knows_nothing_of_what_is_above(part, allowed):
    files = list((PACKAGE / part).rglob("*.py"))
    imported = {name for path in files for name in re.findall(r"meliad_like\.(\w+)", path.read_text())}
    assert files and imported <= allowed
