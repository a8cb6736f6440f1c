#!/usr/bin/env bash
# Trains on TPUs of a GKE cluster, through xpk, in the image of launch/Dockerfile.
#
#   bash launch/gke_xpk.sh --name=run --cluster=CLUSTER --zone=ZONE --type=v5litepod-16 --image=IMAGE --build -- --gin_file=...
#
# --name, --cluster, --zone   of the workload, a new name for each run; --project=PROJECT if it is not gcloud's default
# --type                      of the slice, as in xpk's --tpu-type
# --image=IMAGE               REGION-docker.pkg.dev/PROJECT/REPOSITORY/meliad_like:TAG
# --build                     builds and pushes the image first, with this checkout
# --max_restarts=20           of the whole workload, after preemptions and failures, but not after wrong flags
# --create_flags="..."        more flags for xpk workload create, such as --priority=high
# --logs=FOLDER               gets NAME.log, every line with its pod; default: runs/gke
# --dry_run                   prints the commands and runs none
#
# Ctrl-C ends the waiting, not the workload. --workdir must be a gs:// path, because a pod's disk is lost with the pod.
set -euo pipefail
# shellcheck source=launch/running.sh
source "$(dirname "${BASH_SOURCE[0]}")/running.sh"

name="" cluster="" zone="" project="" type="" image="" max_restarts=20 create_flags="" logs=runs/gke build=""
read_flags "name cluster zone project type image max_restarts create_flags logs" "build" "$@"
need_flags name cluster zone type image
((${#training_arguments[@]})) || stop "what to train is missing: -- --gin_file=FILE --workdir=gs://BUCKET/RUN"
[[ "$name" =~ ^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$ ]] ||
    stop "--name=$name must be at most 40 lower-case letters, digits and -, and begin with a letter"
[[ "${training_arguments[*]}" != *$'\n'* ]] || stop "xpk takes no line breaks in the training's flags; use a gin file"
need_program xpk "pip install xpk, and see https://github.com/AI-Hypercomputer/xpk"
need_program kubectl "gcloud components install kubectl"

place=(--cluster="$cluster" --zone="$zone")
[[ -z "$project" ]] || place+=(--project="$project")
read -ra more <<<"$create_flags"

if [[ -n "$build" ]]; then
    need_program docker "see https://docs.docker.com/engine/install, or leave out --build"
    # As root, because xpk's containers are privileged and the TPUs belong to root.
    execute docker build --file launch/Dockerfile --build-arg ACCELERATOR=tpu --build-arg USER_ID=0 --tag "$image" .
    execute docker push "$image"
fi

# exec, so that xpk's SIGTERM reaches the training. xpk restarts all pods when one ends with a status of 127 or more, or one
# of these: 75 (saved after SIGTERM) and 1 (of the other processes when a host is lost). 2 is a user's mistake.
command="exec $(quote python -m meliad_like.train --distributed "${training_arguments[@]}")"
execute xpk workload create --workload="$name" --tpu-type="$type" --docker-image="$image" --command="$command" \
    --max-restarts="$max_restarts" --restart-on-exit-codes="1,$SAVED" --termination-grace-period-seconds=120 \
    "${place[@]}" ${more[@]+"${more[@]}"}
say "Waiting for $name; this command ends it early:"
quote xpk workload delete --workload="$name" "${place[@]}"
status=0
execute xpk workload list --wait-for-job-completion="$name" "${place[@]}" || status=$?

# The logs of the last attempt; Cloud Logging keeps the earlier ones.
fetch=(kubectl logs --selector=xpk.google.com/workload="$name" --all-containers --prefix --tail=-1 --max-log-requests=1000)
if [[ -n "$dry_run" ]]; then
    say "Writing to $logs/$name.log:"
    execute "${fetch[@]}"
    exit
fi
mkdir -p "$logs"
"${fetch[@]}" >"$logs/$name.log" || say "The logs could not be fetched, for the reason above"
say "Ended with xpk's status $status (125: failed); the logs are in $logs/$name.log"
exit "$status"
