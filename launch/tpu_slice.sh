# shellcheck shell=bash disable=SC2154
# Sourced by tpu_pod.sh, whose flags it uses: creates and deletes one slice of TPUs, and copies the code to it, with gcloud.

place=(--zone="$zone" --quiet)
[[ -z "$project" ]] || place+=(--project="$project")
tpus() { execute gcloud compute tpus "$@" "${place[@]}"; }

delete=(queued-resources delete "$name" --force)
create=(queued-resources create "$name" --node-id="$name" --accelerator-type="$type" --runtime-version="$runtime")
read -ra create_flags <<<"$create_flags${spot:+ --spot}${reserved:+ --reserved}"
create+=(${create_flags[@]+"${create_flags[@]}"})

# on_slice WORKER COMMAND: runs a command in the checkout of a worker, or of all. Returns the command's exit status, or 255
# when ssh fails ten times.
on_slice() { tpus tpu-vm ssh "$name" --worker="$1" --command="mkdir -p meliad_like && cd meliad_like && $2"; }

code=(launch gin meliad_like setup.py requirements.txt constraints.txt constraints-3.12.txt pyproject.toml MANIFEST.in README.md)
worker() { quote bash launch/tpu_worker.sh "$@"; }

pack() { execute mkdir -p "$1" && execute tar -czhf "$1/code.tgz" --exclude=__pycache__ "${code[@]}"; }

# Replaces the code on every worker, after stopping a training that still runs.
install() {
    tpus tpu-vm scp "$1/code.tgz" "$name:meliad_like.tgz" --worker=all || return 255
    local unpack="rm -rf ${code[*]} && tar -xzf ../meliad_like.tgz"
    on_slice all "if test -e launch; then $(worker stop); fi && $unpack && $(worker install)"
}

# Prints READY or another state of the slice or of the request for it; nothing if there is none, or no answer.
slice_state() {
    local state
    state="$(tpus queued-resources describe "$name" --format="value(state.state)" 2>/dev/null)" || true
    if [[ "$state" == ACTIVE ]]; then
        state="$(tpus tpu-vm describe "$name" --format="value(state)" 2>/dev/null)" || state="ACTIVE, but without an answer"
    fi
    printf '%s\n' "$state"
}

# again COMMAND...: repeats a command until it succeeds, at most five times.
again() {
    local try
    for ((try = 1; try < 5; try++)); do
        "$@" && return
        sleep "$poll"
    done
    "$@"
}

# Returns when the slice exists. A queued resource waits until one is free; tpu-vm create would fail if none is. After a
# preemption it can only be deleted and created again. After a failed request the state is requested again, because the
# cloud may not have answered, now or when it was asked for the state.
make_slice() {
    local state="" last=unknown requested="" failures=0 silent=0
    while :; do
        state="$(slice_state)"
        [[ "$state" == "$last" ]] || say "Slice $name: ${state:-none}"
        last="$state"
        if [[ "$state" == FAILED && -n "$requested" ]]; then
            local describe=(gcloud compute tpus queued-resources describe "$name" --zone="$zone")
            stop "there is no such slice to be had; $(quote "${describe[@]}") says why"
        fi
        case "$state" in
            READY) return ;;
            "$requested") # no slice, and no request
                if tpus "${create[@]}"; then requested=asked failures=0; else failures=$((failures + 1)); fi
                ;;
            FAILED | SUSPENDED | PREEMPTED | TERMINATED | STOPPED)
                if tpus "${delete[@]}"; then requested="" failures=0; else failures=$((failures + 1)); fi
                ;;
            *)
                # A request without a state: a missing answer, or somebody has deleted it.
                if [[ -z "$state" ]]; then silent=$((silent + 1)); else silent=0; fi
                ((silent < 10)) || stop "nothing is known of the slice $name any more; the same command asks for it again"
                sleep "$poll"
                ;;
        esac
        ((failures < 5)) || stop "gcloud refused five times in a row; its output is above"
        ((failures == 0)) || sleep "$poll"
    done
}

say_what_costs() {
    say "While it exists, the slice $name costs money; the same command resumes on it, and this deletes it:"
    quote gcloud compute tpus "${delete[@]}" "${place[@]}"
}
