"""The pages of the documentation."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "gin" / "README.md",
    ROOT / "benchmarks" / "results" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
