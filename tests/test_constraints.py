"""The pinned versions are of all that requirements.txt asks for, within its bounds."""

import re
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import meliad_like

ROOT = Path(__file__).parent.parent


def requirements(name: str) -> list[Requirement]:
    lines = (ROOT / name).read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def test_every_requirement_is_pinned_within_its_bounds():
    pins = {
        canonicalize_name(pin.name): str(pin.specifier).removeprefix("==") for pin in requirements("constraints.txt")
    }
    assert all(re.fullmatch(r"\d[\w.]*", version) for version in pins.values())
    for required in requirements("requirements.txt"):
        assert required.specifier.contains(pins[canonicalize_name(required.name)]), required


def test_the_citation_is_of_this_version():
    assert f"\nversion: {meliad_like.__version__}\n" in (ROOT / "CITATION.cff").read_text()
