#!/usr/bin/env bash
# In the place of every Python on a worker of fake_gcloud.sh. The line of $CLOUD/plan that belongs to this attempt says how
# the training ends: exit STATUS, preempt STEP (saved before), or wait (for SIGTERM).
case "$*" in
    *"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
    *"pip install"*) echo "${!#}" >>"$CLOUD/installed_$WORKER" ;;
    *meliad_like.train*)
        printf '%q ' "$@" >>"$CLOUD/trained_$WORKER"
        echo >>"$CLOUD/trained_$WORKER"
        echo "34,410 parameters, from step $(cat "$CLOUD/step") to 3,000; 1.27% of the positions are padding"
        read -r outcome number < <(sed -n "$(wc -l <"$CLOUD/trained_$WORKER")p" "$CLOUD/plan")
        case "$outcome" in
            exit) exit "$number" ;;
            preempt)
                if ((WORKER == 0)); then
                    echo "$number" >"$CLOUD/step"
                    echo SUSPENDED >"$CLOUD/request"
                    echo PREEMPTED >"$CLOUD/node"
                fi
                exit 143
                ;;
            wait)
                trap 'echo saved; exit 75' TERM
                touch "$CLOUD/waiting_$WORKER"
                while :; do sleep 0.1; done
                ;;
        esac
        ;;
esac
