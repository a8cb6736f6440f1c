#!/usr/bin/env bash
# In the place of gcloud: two workers are folders of $CLOUD, and ssh runs commands there. request and node hold the states
# of the queued resource (its first line, and those to come) and of the slice. refused has patterns of the next requests that
# fail, in their order.
printf '%q ' "$@" >>"$CLOUD/log"
echo >>"$CLOUD/log"
shift 2
refused="$(head -n 1 "$CLOUD/refused" 2>/dev/null)"
# shellcheck disable=SC2053  # a pattern
if [[ -n "$refused" && "$*" == $refused ]]; then
    sed -i 1d "$CLOUD/refused"
    echo "ERROR: 503" >&2
    exit 1
fi
case "$1 $2" in
    "queued-resources describe")
        head -n 1 "$CLOUD/request" 2>/dev/null || exit 1
        (($(wc -l <"$CLOUD/request") == 1)) || sed -i 1d "$CLOUD/request"
        ;;
    "queued-resources create")
        printf '%b\n' "${STATES:-ACTIVE}" >"$CLOUD/request"
        echo READY >"$CLOUD/node"
        mkdir "$CLOUD/worker_0" "$CLOUD/worker_1"
        ;;
    "queued-resources delete") rm -r "$CLOUD/request" "$CLOUD/node" "$CLOUD"/worker_* ;;
    "tpu-vm describe") if [[ "$*" == *networkEndpoints* ]]; then echo 2; else cat "$CLOUD/node"; fi ;;
    "tpu-vm scp") for folder in "$CLOUD"/worker_*; do cp "$3" "$folder/${4#*:}"; done ;;
    "tpu-vm ssh")
        status=0
        worker="${4#--worker=}"
        for folder in "$CLOUD"/worker_${worker/all/*}; do
            (cd "$folder" && WORKER="${folder##*_}" bash -c "${5#--command=}") || status=$?
        done
        [[ "$(cat "$CLOUD/node")" == READY ]] || exit 255
        exit "$status"
        ;;
esac
