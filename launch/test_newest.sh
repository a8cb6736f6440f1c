#!/usr/bin/env bash
# Runs a part of the tests with the newest installed Python and the versions of constraints-3.12.txt, in .venv-newest;
# arguments go to pytest. PYTHON=/path/to/python chooses the interpreter.
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
[[ "${1:-}" != --help ]] || show_help

newest="${PYTHON:-}"
# The last of them that is one: version managers leave stubs for versions that aren't there.
for candidate in python3.12 python3.13 python3.14 "$HOME"/.pyenv/versions/3.1[2-9]*/bin/python; do
    if [[ -z "${PYTHON:-}" ]] && "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
        newest="$candidate"
    fi
done
if [[ -z "$newest" ]]; then
    say "Python 3.12 or newer is not installed: these tests are left out"
    exit
fi
wanted="$(pwd && cat requirements.txt constraints-3.12.txt)"
if [[ ! -f .venv-newest/installed || "$(<.venv-newest/installed)" != "$wanted" ]]; then
    say "Making .venv-newest with $("$newest" --version)"
    "$newest" -m venv --clear .venv-newest
    .venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
        --constraint constraints-3.12.txt --requirement requirements.txt beartype gcsfs hypothesis pytest pytest-xdist setuptools
    printf '%s\n' "$wanted" >.venv-newest/installed
fi

(($#)) || set -- -m "not exhaustive and not thorough" tests/test_{checkpoints,golden_models,smoke,token_store}.py
export JAX_PLATFORMS=cpu
say "Running a part of the tests with $(.venv-newest/bin/python --version)"
PYTHONPATH="$PWD" exec .venv-newest/bin/python -m pytest -n 2 --dist worksteal -q -p no:cacheprovider "$@"
