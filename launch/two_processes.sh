#!/usr/bin/env bash
# Trains in two processes on this machine's CPU that form one mesh, as two hosts would. All arguments go to the training:
#
#   bash launch/two_processes.sh [--dry_run] --gin_file=quickstart.gin --workdir=runs/two
#
# The progress shown is that of process 0; the output of each process is in WORKDIR/logs. Ctrl-C and SIGTERM reach both,
# which then save and end with status 75: the same command resumes. A second Ctrl-C ends them at once. When one fails, the
# other gets GRACE seconds (default 60) to notice and is then ended. The exit status is the worse of the two.
# XLA_FLAGS=--xla_force_host_platform_device_count=4 makes four devices of each process.
set -euo pipefail
# shellcheck source=launch/running.sh
source "$(dirname "${BASH_SOURCE[0]}")/running.sh"

dry_run=""
case "${1:-}" in
    --help) show_help ;;
    --dry_run) dry_run=1 && shift ;;
esac
workdir=""
for argument; do [[ "$argument" != --workdir=* ]] || workdir="${argument#*=}"; done
[[ -n "$workdir" ]] || stop "--workdir=FOLDER is missing: where the run and its logs shall lie"
logs="$workdir/logs"
[[ "$workdir" != *://* ]] || logs=runs/two_processes/logs

port=$((20000 + RANDOM % 10000))
while (: <"/dev/tcp/localhost/$port") 2>/dev/null; do port=$((port + 1)); done
command=(env JAX_PLATFORMS=cpu python -m meliad_like.train "$@" --coordinator_address="localhost:$port" --num_processes=2)
if [[ -n "$dry_run" ]]; then
    for process in 0 1; do quote "${command[@]}" --process_id="$process"; done
    exit
fi
set_up_environment
mkdir -p "$logs"

pids=()
for process in 0 1; do
    touch "$logs/process_$process.log"
    sizes[process]=$(wc -c <"$logs/process_$process.log")
    "${command[@]}" --process_id="$process" >>"$logs/process_$process.log" 2>&1 &
    pids+=("$!")
done
# It ends with process 0, even if another program has the log open.
tail --pid="${pids[0]}" --sleep-interval=0.2 -c "+$((sizes[0] + 1))" -f "$logs/process_0.log" |
    while IFS= read -r line; do printf '[0] %s\n' "$line"; done &
printer=$!

asked=0
# shellcheck disable=SC2329  # called by the trap
pass_on() {
    local signal=TERM
    ((++asked == 1)) || signal=KILL
    say "Sending SIG$signal to both processes"
    kill -s "$signal" "${pids[@]}" 2>/dev/null || true
}
trap pass_on INT TERM

# The training ends when its peer dies; this ends one that hangs.
statuses=(running running)
worst=0
deadline=""
while [[ "${statuses[*]}" == *running* ]]; do
    sleep 0.2 || true # Ctrl-C ends it too
    for process in 0 1; do
        if [[ "${statuses[process]}" != running ]] || kill -0 "${pids[process]}" 2>/dev/null; then continue; fi
        wait "${pids[process]}" && status=0 || status=$?
        statuses[process]=$status
        if ((status > worst)); then worst=$status failed=$process; fi
    done
    if [[ "${statuses[*]}" != *running* ]] || ((worst == 0 || worst == SAVED)); then continue; fi
    if [[ -z "$deadline" ]]; then
        say "Process $failed ended with status $worst; the other one has ${GRACE:-60} s to end"
        deadline=$((SECONDS + ${GRACE:-60}))
    elif ((SECONDS >= deadline)); then
        say "Process $((1 - failed)) did not end, and is killed"
        kill -KILL "${pids[1 - failed]}" 2>/dev/null || true
        statuses[1 - failed]=killed
    fi
done
wait "$printer" || true
if ((worst != 0 && worst != SAVED)); then tail -c "+$((sizes[1] + 1))" "$logs/process_1.log" | tail -n 3; fi
say "Ended with status ${statuses[0]} and ${statuses[1]}; the logs are in $logs"
exit "$worst"
