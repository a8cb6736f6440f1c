# shellcheck shell=bash
# Sourced first by the scripts that start runs, such as tpu_pod.sh: environment.sh, and functions that read flags, print
# commands and interpret how a run ended.
set -euo pipefail

# shellcheck source=launch/environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# The exit status of training after SIGTERM, when everything is saved (meliad_like/training/processes.py).
# shellcheck disable=SC2034  # for the scripts that source this
SAVED=75

# Prints a command as one line that a shell, and Python's shlex, read back as the same words.
quote() {
    local word line="" mark="'"
    for word; do
        [[ "$word" =~ ^[A-Za-z0-9_./:=@%+,-]+$ ]] || word="'${word//$mark/$mark\\$mark$mark}'"
        line+=" $word"
    done
    printf '%s\n' "${line# }"
}

# Runs a command, or under --dry_run prints it.
execute() { if [[ -n "${dry_run:-}" ]]; then quote "$@"; else "$@"; fi; }

# need_program NAME ADVICE: stops if the program is missing, except under --dry_run.
need_program() { [[ -n "${dry_run:-}" ]] || command -v "$1" >/dev/null || stop "$1 is not installed; $2"; }

# read_flags "NAMES" "SWITCHES" ARGUMENTS: --name=value, --switch and --dry_run set the variables of these names, which
# already have their defaults; arguments after `--` become training_arguments. --help prints the script's first comment.
dry_run=""
training_arguments=()
read_flags() {
    local names=" $1 " switches=" $2 dry_run " flag
    shift 2
    while (($#)) && [[ "$1" != -- ]]; do
        flag="${1%%=*}"
        flag="${flag#--}"
        if [[ "$1" == --help ]]; then
            show_help
        elif [[ "$1" == --*=* && "$names" == *" $flag "* ]]; then
            printf -v "$flag" '%s' "${1#*=}"
        elif [[ "$1" == --* && "$1" != *=* && "$switches" == *" $flag "* ]]; then
            printf -v "$flag" 1
        elif [[ "$1" == --* && "$names" == *" $flag "* ]]; then
            stop "--$flag needs a value: --$flag=VALUE"
        else
            stop "unexpected argument $1; --help shows this script's own flags, and those of the training come after --"
        fi
        shift
    done
    # shellcheck disable=SC2034  # for the script that sources this
    training_arguments=("${@:2}")
}

# need_flags NAMES: stops if one is missing.
need_flags() {
    local flag
    for flag; do [[ -n "${!flag}" ]] || stop "--$flag=VALUE is missing; --help shows what it means"; done
}

# The step from which a run started, by its log; empty if the run ended before it started.
start_step() { [[ ! -f "$1" ]] || sed -n 's/.* parameters, from step \([0-9,]*\) to .*/\1/p' "$1" | tail -n 1 | tr -d ,; }
