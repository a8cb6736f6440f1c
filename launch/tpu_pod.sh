#!/usr/bin/env bash
# Trains on a TPU pod slice: creates the slice or uses the one of that name, copies this checkout to it, runs the same
# command on every worker, and after a preemption creates the slice again and resumes from the last checkpoint.
#
#   bash launch/tpu_pod.sh --name=pod --zone=us-central2-b --type=v4-64 --spot -- --gin_file=... --workdir=gs://BUCKET/RUN
#
# --name, --zone, --type   of the slice; the type as in gcloud's --accelerator-type, up to v6e (v7x: gke_xpk.sh)
# --project=PROJECT        if it is not gcloud's default
# --spot, --reserved       preemptible, or from a reservation; otherwise on demand
# --runtime=VERSION        TPU software, if not Google's default for the type
# --create_flags="..."     more flags for gcloud compute tpus queued-resources create, such as --network=NAME
# --before=COMMAND         runs on every worker first, in the checkout; for example fetches the token store
# --max_restarts=5         gives up after this number of consecutive restarts from the same step
# --logs=FOLDER            gets attempt_1/worker_0.log and so on; default: runs/pods/NAME
# --keep                   keeps the slice after the last step; after a failure or Ctrl-C it is kept in any case
# --poll=30                seconds between requests for the state of a slice that is being created
# --dry_run                prints the commands and runs none
#
# Ctrl-C and SIGTERM: the training saves, then this ends with status 75. The same command resumes.
set -euo pipefail
# shellcheck source=launch/running.sh
source "$(dirname "${BASH_SOURCE[0]}")/running.sh"

name="" zone="" type="" project="" runtime="" create_flags="" before="" max_restarts=5 logs="" poll=30
spot="" reserved="" keep=""
read_flags "name zone type project runtime create_flags before max_restarts logs poll" "spot reserved keep" "$@"
need_flags name zone type
((${#training_arguments[@]})) || stop "what to train is missing: -- --gin_file=FILE --workdir=gs://BUCKET/RUN"
[[ "$max_restarts" =~ ^[0-9]+$ ]] || stop "--max_restarts=$max_restarts must be a whole number"
: "${logs:=runs/pods/$name}"
case "$type" in
    v6e*) : "${runtime:=v2-alpha-tpuv6e}" ;;
    v5p*) : "${runtime:=v2-alpha-tpuv5}" ;;
    v5lite*) : "${runtime:=v2-alpha-tpuv5-lite}" ;;
    v[234]-*) : "${runtime:=tpu-ubuntu2204-base}" ;;
    *) [[ -n "$runtime" ]] || stop "--type=$type is not one of v2 to v6e; give its software with --runtime=VERSION" ;;
esac
need_program gcloud "https://cloud.google.com/sdk/docs/install says how"
# shellcheck source=launch/tpu_slice.sh
source launch/tpu_slice.sh

# Leaves the workers' exit statuses in `statuses`.
train() {
    local number workers processes=() command
    # The attempt's name is new also where two runs of this script train within a second.
    command="$(worker train "$(date +%s)-$$-$attempt" "$before" "${training_arguments[@]}")"
    if [[ -n "$dry_run" ]]; then
        say "The same command runs on every other worker at the same time, with its own log:"
        on_slice 0 "$command"
        return
    fi
    # The slice may be lost by now, or the cloud may not answer.
    workers="$(tpus tpu-vm describe "$name" --format="value(networkEndpoints.len())")" || workers=""
    if [[ ! "$workers" =~ ^[1-9][0-9]*$ ]]; then
        statuses=(255)
        return
    fi
    say "Training on $workers workers, each with a log in $1; this is worker 0"
    trap stop_training INT TERM
    { on_slice 0 "$command" 2>&1 </dev/null | tee "$1/worker_0.log"; } &
    processes+=("$!")
    for ((number = 1; number < workers; number++)); do
        on_slice "$number" "$command" >"$1/worker_$number.log" 2>&1 </dev/null &
        processes+=("$!")
    done
    statuses=()
    for number in "${!processes[@]}"; do
        # A signal to this script ends a wait early.
        while :; do
            wait "${processes[number]}" && statuses[number]=0 || statuses[number]=$?
            kill -0 "${processes[number]}" 2>/dev/null || break
        done
    done
    trap - INT TERM
}

stopping=""
# shellcheck disable=SC2329  # called by the trap
stop_training() {
    trap - INT TERM
    stopping=1
    say "Sending SIGTERM to the training on all workers, which saves and ends"
    on_slice all "$(worker stop)" || true
}

attempt=1
while [[ -e "$logs/attempt_$attempt" ]]; do attempt=$((attempt + 1)); done
if [[ -n "$dry_run" ]]; then
    say "Unless the slice exists:"
    tpus "${create[@]}"
    pack "$logs/attempt_$attempt"
    install "$logs/attempt_$attempt"
    train
    exit
fi
trap say_what_costs EXIT
step=-1 restarts=0
while :; do
    folder="$logs/attempt_$attempt"
    make_slice
    pack "$folder"
    if install "$folder"; then train "$folder"; else statuses=("$?"); fi
    say "Exit statuses of the workers: ${statuses[*]}"
    [[ -z "$stopping" ]] || exit "$SAVED"
    worst="$(printf '%s\n' "${statuses[@]}" | sort -n | tail -n 1)"
    ((worst > 0)) || break
    # Saved after SIGTERM, killed, connection lost; or another status, but the slice is lost.
    if [[ ! " ${statuses[*]} " =~ \ ($SAVED|137|143|255)\  && "$(slice_state)" == READY ]]; then
        say "The training failed; the logs in $folder say why"
        exit "$worst"
    fi
    began="$(start_step "$folder/worker_0.log")"
    if ((${began:--1} > step)); then restarts=0; else restarts=$((restarts + 1)); fi
    step="${began:-$step}"
    ((restarts < max_restarts)) || stop "$restarts restarts in a row saved nothing; the logs are in $logs"
    attempt=$((attempt + 1))
    say "Preempted: resuming from the last checkpoint"
done
[[ -n "$keep" ]] || again tpus "${delete[@]}"
trap - EXIT
say "Done; the logs are in $logs"
