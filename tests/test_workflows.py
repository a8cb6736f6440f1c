"""The workflows of GitHub Actions run what is run here, with the Pythons that the package names."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
CHECKS = yaml.safe_load((ROOT / ".github/workflows/checks.yml").read_text())


def test_all_checks_run_on_the_oldest_and_the_newest_python_of_every_push():
    # YAML 1.1 reads the key `on` as true.
    assert {"push", "pull_request"} <= set(CHECKS[True])
    job = CHECKS["jobs"]["checks"]
    assert "bash .ci/run" in [step.get("run") for step in job["steps"]]
    versions = re.findall(r'"(3\.\d+)"', (ROOT / "setup.py").read_text())
    named = {entry["version"]: entry["interpreter"] for entry in job["strategy"]["matrix"]["include"]}
    assert named == {versions[0]: "", versions[-1]: f"python{versions[-1]}"}


def test_the_wheel_and_the_site_are_built():
    commands = "\n".join(step.get("run", "") for step in CHECKS["jobs"]["package"]["steps"])
    assert "pip wheel --no-deps" in commands and "twine check" in commands and "mkdocs build --strict" in commands
    assert all((ROOT / name).exists() for name in re.findall(r"constraints[\w.-]*\.txt", commands))
