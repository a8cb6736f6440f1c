#!/usr/bin/env bash
# Sets up what the tests need and runs them: without arguments a part of the tests, with --all all of them, as .ci/run
# does. Other arguments go to pytest: bash launch/test.sh tests/test_launch.py -k wheel
set -euo pipefail
# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
[[ "${1:-}" != --help ]] || show_help
set_up_environment dev

# The tests' numbers are for the CPU, also on a machine with an accelerator.
export JAX_PLATFORMS=cpu
if (($# == 0)); then
    set -- -m "not exhaustive and not thorough"
elif [[ "$1" == --all ]]; then
    shift
fi
say "Running the tests on four processes"
exec python -m pytest -n 4 --dist worksteal -q "$@"
