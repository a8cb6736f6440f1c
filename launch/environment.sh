# shellcheck shell=bash
# Sourced by the other scripts: goes to the checkout's root and defines set_up_environment, which makes .venv once,
# installs into it only when the requirements changed, and puts its programs first on the PATH. Without a change it
# never calls pip, so it works offline. PYTHON=/path/to/python chooses the interpreter that .venv is made with.
set -euo pipefail

[[ "$0" == /* ]] && script="$0" || script="$PWD/$0"
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# On a CPU the memory of a step's arrays is freed after each step; with huge pages, allocating it again is faster, by an
# eighth of the step. Read by glibc 2.35 and newer when a program starts, otherwise without effect.
export GLIBC_TUNABLES="${GLIBC_TUNABLES:-glibc.malloc.hugetlb=1}"

# Images of containers set it. Every program would compile all the modules that it imports again, for seconds.
unset PYTHONDONTWRITEBYTECODE

say() { printf '== %s\n' "$*"; }

# Prints the first comment of the script that sources this, and ends it.
show_help() {
    sed -n '2,${/^#/!q;s/^# \{0,1\}//p;}' "$script"
    exit
}

stop() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

# A program of that name is not enough: version managers leave stubs for versions that aren't there.
is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

can_make_environments() { "$1" -c 'import ensurepip, venv' 2>/dev/null; }

# Prints the first usable interpreter; the best tested versions come first.
find_python() {
    local candidate without_venv="" candidates=(python3.11 python3.12 python3.13 python3.14 python3 python)
    [[ -z "${PYTHON:-}" ]] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        is_new_enough "$candidate" || continue
        if can_make_environments "$candidate"; then
            echo "$candidate"
            return
        fi
        without_venv="$candidate"
    done
    [[ -z "$without_venv" ]] ||
        stop "$without_venv cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv"
    local found="no python3 on the PATH is"
    [[ -z "${PYTHON:-}" ]] || found="$PYTHON is not"
    stop "$found Python 3.11 or newer; install one and name it: PYTHON=/path/to/python3.12"
}

# The file of the tested versions of all requirements for the Python of .venv.
constraints() {
    .venv/bin/python -c 'import sys; print("constraints.txt" if sys.version_info < (3, 12) else "constraints-3.12.txt")'
}

make_environment() {
    local python
    python="$(find_python)"
    say "Making .venv with $("$python" --version)"
    "$python" -m venv --clear --without-pip .venv
    touch .venv/unfinished
    .venv/bin/python -m ensurepip --default-pip >/dev/null
}

# set_up_environment [EXTRA]: dev adds the tools of the tests and the linters, gpu or tpu an accelerator. It holds a lock
# on this file (its last line), so that the quick start and the tests can be started at the same time.
set_up_environment() {
    local extra="${1:-base}" interrupted="" wanted stamp stamps begin=$SECONDS
    if command -v flock >/dev/null && ! flock --nonblock 9; then
        say "Waiting for another set-up of this folder"
        flock 9
    fi
    PATH="$PWD/.venv/bin:$PATH"

    # The stamp includes the folder, because programs and links in .venv point to the old folder after a move.
    wanted="$(pwd && cat requirements.txt setup.py)"
    stamps=(".venv/installed-$extra")
    # Each extra includes base, but dev includes no accelerator.
    [[ "$extra" != base ]] || stamps=(.venv/installed-*)
    for stamp in "${stamps[@]}"; do
        if [[ -f "$stamp" && "$(<"$stamp")" == "$wanted" && ! -e .venv/unfinished ]] && is_new_enough .venv/bin/python
        then
            say "Using .venv, which is up to date"
            return
        fi
    done

    # pip considers packages installed that it had only partly written when it was killed or interrupted.
    if [[ -e .venv/unfinished ]] || ! is_new_enough .venv/bin/python; then make_environment; fi
    say "Installing the requirements of setup.py and requirements.txt into .venv (minutes the first time)"
    touch .venv/unfinished
    trap 'interrupted=yes' INT
    # Python compiles the modules that it imports; pip would compile all, for half a minute.
    if ! .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
        --constraint "$(constraints)" --editable ".[$extra]"; then
        [[ -z "$interrupted" ]] || stop "interrupted during the installation; the same command begins it afresh"
        rm .venv/unfinished
        stop "pip could not install, for the reason above; fix it and run this again"
    fi
    trap - INT
    rm -f .venv/installed-* .venv/unfinished
    printf '%s\n' "$wanted" >".venv/installed-$extra"
    say "Installed in $((SECONDS - begin)) s"
} 9<launch/environment.sh
