#!/usr/bin/env bash
# tpu_pod.sh runs this on every worker of a slice, over ssh:
#
#   tpu_worker.sh install                               makes .venv
#   tpu_worker.sh train ATTEMPT BEFORE [ARGUMENT]...    trains, shows the output, ends with the training's exit status
#   tpu_worker.sh stop                                  SIGTERM to the training, which saves; returns when it has ended
#
# The training does not depend on the connection: gcloud repeats a command whose connection broke, and `train` of an
# attempt that already runs shows its output.
set -euo pipefail
# shellcheck source=launch/running.sh
source "$(dirname "${BASH_SOURCE[0]}")/running.sh"
PATH="$PWD/.venv/bin:$PATH"

state=runs/worker
mkdir -p "$state"
touch "$state/attempt"

# The process id may belong to another program by now.
is_running() { [[ -f "$state/process" ]] && grep -qs tpu_worker.sh "/proc/$(<"$state/process")/cmdline"; }

stop_training() {
    is_running || return 0
    kill -TERM -- "-$(<"$state/process")"
    while is_running; do sleep 1; done
}

case "$1" in
    install)
        # Ubuntu 22.04, which TPU VMs have, comes with Python 3.10.
        if ! is_new_enough .venv/bin/python && ! (find_python) >/dev/null 2>&1; then
            say "Installing Python 3.12, because this machine has only older ones"
            python3 -m pip install --quiet --user uv
            python3 -m uv python install 3.12
            PYTHON="$(python3 -m uv python find 3.12)"
            export PYTHON
        fi
        set_up_environment tpu
        ;;
    train)
        if [[ "$(<"$state/attempt")" != "$2" ]]; then
            rm -f "$state/status"
            : >"$state/log"
            printf '%s\n' "$2" >"$state/attempt"
            # In a separate session and process group, whose id is that of this process.
            setsid bash launch/tpu_worker.sh run "${@:3}" >>"$state/log" 2>&1 </dev/null &
            printf '%s\n' "$!" >"$state/process"
        fi
        tail --pid="$(<"$state/process")" --sleep-interval=0.2 -n +1 -f "$state/log"
        # Without a status it was killed, for example with the machine.
        exit "$(cat "$state/status" 2>/dev/null || echo 143)"
        ;;
    run)
        # SIGTERM ends the programs below; this one remains, and saves their status.
        trap : TERM
        status=0
        if [[ -n "$2" ]]; then
            say "$2"
            bash -c "$2" || status=$?
        fi
        if ((status == 0)); then python -m meliad_like.train --distributed "${@:3}" || status=$?; fi
        printf '%s\n' "$status" >"$state/status"
        ;;
    stop)
        stop_training
        ;;
esac
