"""The launch scripts and the packaging, which run before any Python code of the package."""

import os
import subprocess
import sys
import sysconfig
import textwrap
import venv
import zipfile
from pathlib import Path

import pytest
from families import CONFIGS, language_model

from meliad_like import library
from meliad_like.conversion.parameters import write_checkpoint

ROOT = Path(__file__).resolve().parent.parent

# Stands in for every Python: logs what it makes and installs, and fails, or kills the script, on demand.
FAKE_PYTHON = """#!/usr/bin/env bash
case "$*" in
    *version_info*) exit "${TOO_OLD:-0}" ;;
    *"import ensurepip"*) exit "${NO_VENV:-0}" ;;
    *"-m venv"*) echo make >>"$LOG" && rm -rf .venv && mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    *"pip install"*)
        echo "install ${!#}" >>"$LOG"
        [[ -z "${KILLED:-}" ]] || kill -9 "$PPID"
        [[ -z "${INTERRUPTED:-}" ]] || { kill -INT "$PPID" && exit 1; }
        exit "${OFFLINE:-0}" ;;
esac
"""

# Runs its arguments with Ctrl-C as by default: a shell that starts the tests in the background makes them ignore it.
AS_BY_DEFAULT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execvp(sys.argv[1], sys.argv[1:])
"""


class Checkout:
    """A folder, with a space in its name, of the set-up's files, and a PATH that begins with fake Pythons."""

    def __init__(self, folder: Path):
        self.root = folder / "a checkout"
        self.log = folder / "log"
        self.log.touch()
        programs = folder / "programs"
        (self.root / "launch").mkdir(parents=True)
        programs.mkdir()
        for name in ("requirements.txt", "setup.py", "launch/environment.sh"):
            (self.root / name).write_text((ROOT / name).read_text())
        for name in ("python3.11", "python3.12", "python3.13", "python3.14", "python3", "python"):
            (programs / name).write_text(FAKE_PYTHON)
            (programs / name).chmod(0o755)
        self.environment = {"PATH": f"{programs}:/usr/bin:/bin", "LOG": str(self.log)}

    def set_up(self, extra: str = "", **environment: str) -> subprocess.CompletedProcess:
        """Runs set_up_environment from another folder, as a person may."""
        script = 'source "$1/launch/environment.sh"; set_up_environment $2; pwd'
        return subprocess.run(
            [sys.executable, "-c", AS_BY_DEFAULT, "bash", "-c", script, "launch/quickstart.sh", str(self.root), extra],
            env=self.environment | environment,
            cwd="/",
            capture_output=True,
            text=True,
        )

    def installs(self) -> list[str]:
        """What was made and installed, in order."""
        return self.log.read_text().splitlines()


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


def test_environment_is_made_once(checkout):
    first = checkout.set_up()
    assert first.returncode == 0, first.stderr
    assert first.stdout.splitlines()[-1] == str(checkout.root)
    second = checkout.set_up(OFFLINE="1")
    assert second.returncode == 0 and "up to date" in second.stdout
    assert checkout.installs() == ["make", "install .[base]"]


def test_tests_add_their_tools_and_the_quick_start_takes_them(checkout):
    checkout.set_up()
    checkout.set_up("dev")
    checkout.set_up()
    assert checkout.installs() == ["make", "install .[base]", "install .[dev]"]


def test_an_accelerator_is_installed_beside_the_tools_of_the_tests(checkout):
    """Otherwise a GPU cluster on whose login node the tests have run would train on its CPUs."""
    checkout.set_up("dev")
    checkout.set_up("gpu")
    checkout.set_up("gpu")
    checkout.set_up()
    assert checkout.installs() == ["make", "install .[dev]", "install .[gpu]"]


@pytest.mark.parametrize("name", ["requirements.txt", "setup.py"])
def test_changed_requirements_are_installed_into_the_same_environment(checkout, name):
    checkout.set_up()
    with (checkout.root / name).open("a") as file:
        file.write("# changed\n")
    checkout.set_up()
    assert checkout.installs() == ["make", "install .[base]", "install .[base]"]


def test_moved_checkout_is_installed_again(checkout):
    checkout.set_up()
    checkout.root = checkout.root.rename(checkout.root.with_name("moved"))
    checkout.set_up()
    assert checkout.installs() == ["make", "install .[base]", "install .[base]"]


def test_killed_installation_begins_afresh(checkout):
    assert checkout.set_up(KILLED="1").returncode == -9
    assert checkout.set_up().returncode == 0
    assert checkout.installs() == ["make", "install .[base]", "make", "install .[base]"]


def test_interrupted_installation_begins_afresh(checkout):
    """pip handles Ctrl-C itself, and may leave half a package."""
    interrupted = checkout.set_up(INTERRUPTED="1")
    assert interrupted.returncode == 2
    assert interrupted.stderr == "error: interrupted during the installation; the same command begins it afresh\n"
    assert checkout.set_up().returncode == 0
    assert checkout.installs() == ["make", "install .[base]", "make", "install .[base]"]


def test_failed_installation_is_tried_again_and_stops_with_one_line(checkout):
    failed = checkout.set_up(OFFLINE="1")
    assert failed.returncode == 2
    assert failed.stderr.startswith("error: pip could not install") and failed.stderr.count("\n") == 1
    checkout.set_up()
    assert checkout.installs() == ["make", "install .[base]", "install .[base]"]


def test_environment_whose_python_is_gone_is_made_again(checkout):
    checkout.set_up()
    (checkout.root / ".venv/bin/python").unlink()
    checkout.set_up()
    assert checkout.installs() == ["make", "install .[base]"] * 2


def test_the_newest_python_alone_is_enough(checkout):
    for path in Path(checkout.environment["PATH"].partition(":")[0]).iterdir():
        if path.name != "python3.14":
            path.write_text("#!/bin/sh\nexit 1\n")
    assert checkout.set_up().returncode == 0
    assert checkout.installs() == ["make", "install .[base]"]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"TOO_OLD": "1"}, "error: no python3 on the PATH is Python 3.11 or newer; install one and name it: PYTHON="),
        ({"TOO_OLD": "1", "PYTHON": "python3.12"}, "error: python3.12 is not Python 3.11 or newer; install one"),
        ({"PYTHON": "/no/such/python"}, "error: /no/such/python is not Python 3.11 or newer; install one"),
        ({"NO_VENV": "1"}, "cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv\n"),
    ],
)
def test_unusable_python_gets_one_line(checkout, environment, message):
    result = checkout.set_up(**environment)
    assert result.returncode == 2
    assert message in result.stderr and result.stderr.count("\n") == 1
    assert checkout.installs() == []


def test_wheel_from_the_source_distribution_contains_every_module_gin_file_and_table(built):
    archive, wheel = built
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", archive, wheel], check=True)
    suffixes = (".py", ".css", ".csv", ".gin", ".js", ".html", ".toml", ".typed")
    expected = {str(p.relative_to(ROOT)) for p in ROOT.glob("meliad_like/**/*") if p.suffix in suffixes}
    gin_files = [path for path in ROOT.glob("gin/**/*") if path.suffix in (".gin", ".csv")]
    expected |= {f"meliad_like/gin_files/{path.relative_to(ROOT / 'gin')}" for path in gin_files}
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == expected


@pytest.mark.thorough
def test_the_library_needs_only_the_wheel(built, tmp_path):
    """The lines of the library's docstring run in an empty folder, in a virtual environment with only the wheel."""
    environment, folder = tmp_path / "environment", tmp_path / "empty"
    venv.create(environment, symlinks=True)
    [packages] = environment.glob("lib/python*/site-packages")
    zipfile.ZipFile(built[1]).extractall(packages)
    # The packages that it requires are those of the tests' environment, without this checkout.
    (packages / "requirements.pth").write_text(sysconfig.get_path("purelib") + "\n")
    opened = language_model(CONFIGS["lstm:dual"]).opened
    write_checkpoint(folder / "runs/quickstart/checkpoints", opened.params, opened.run, opened.vocabulary)
    (folder / "book.txt").write_text("A book. " * 20)
    lines = textwrap.dedent("\n".join(library.__doc__.split("\n\n")[1:3]))
    code = f"{lines}\nprint(meliad_like.__file__, book.num_tokens)"
    without_checkout = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    python = [environment / "bin" / "python", "-c", code]
    done = subprocess.run(python, cwd=folder, env=without_checkout, capture_output=True, check=True)
    assert done.stdout.decode().splitlines()[-1] == f"{packages / 'meliad_like' / '__init__.py'} 160"


def test_gin_folder_does_not_hide_the_gin_library():
    assert not list(ROOT.glob("gin/**/*.py"))
