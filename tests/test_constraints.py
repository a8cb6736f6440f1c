"""The pinned versions are of all that requirements.txt asks for, within its bounds."""

import re
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import meliad_like

ROOT = Path(__file__).parent.parent


def requirements(name: str) -> list[Requirement]:
    lines = (ROOT / name).read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize(("name", "python"), [("constraints.txt", "3.11"), ("constraints-3.12.txt", "3.14")])
def test_every_requirement_is_pinned_within_its_bounds(name, python):
    pins = {canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in requirements(name)}
    assert all(re.fullmatch(r"\d[\w.]*", version) for version in pins.values())
    for required in requirements("requirements.txt"):
        if required.marker is not None and not required.marker.evaluate({"python_version": python}):
            continue
        assert required.specifier.contains(pins[canonicalize_name(required.name)]), required


def test_pages_name_no_version_of_the_tpu_compiler():
    """jax names it, and constraints.txt and constraints-3.12.txt have different ones."""
    pages = [ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]
    assert [page.name for page in pages if "libtpu==" in page.read_text()] == []


def test_every_requirement_is_imported():
    """All but flatbuffers, without which jax.export can't write a program."""
    files = (ROOT / "meliad_like").rglob("*.py")
    modules = {name for path in files for name in re.findall(r"(?m)^\s*(?:from|import) (\w+)", path.read_text())}
    distributions = packages_distributions()
    imported = {canonicalize_name(name) for module in modules for name in distributions.get(module, ())}
    required = {canonicalize_name(each.name) for each in requirements("requirements.txt")}
    assert required - imported - {"backports-zstd"} == {"flatbuffers"}


def test_the_citation_is_of_this_version():
    assert f"\nversion: {meliad_like.__version__}\n" in (ROOT / "CITATION.cff").read_text()
