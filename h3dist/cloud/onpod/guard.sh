#!/usr/bin/env bash
# The first process of a rented pod. It starts what the image starts, and ends the pod when its time is up,
# whether or not anybody still looks after it.
#
#   guard.sh LIFETIME_S COMMAND [ARGUMENT...]
#
# Read from the pod's environment: H3_POD_STATE (a folder on the container's own disk), H3_POD_API (the API's
# address), RUNPOD_POD_ID and RUNPOD_API_KEY (the pod's own, put there by the cloud: a key that can end this
# pod; the user's key never comes here), HF_TOKEN (kept for the download step, readable by its owner alone).
# Without a key that works the container is stopped instead: this script is its first process, and it leaves.
set -u
lifetime=$1
shift
state=${H3_POD_STATE:-/tmp/h3-pod}
mkdir -p -m 700 "$state"
umask 077
# written once: a container that is started again does not live longer for it
[ -s "$state/expires" ] || {
    echo $(($(date +%s) + lifetime)) >"$state/expires.new" && mv "$state/expires.new" "$state/expires"
}
[ -z "${HF_TOKEN:-}" ] || printf '%s' "$HF_TOKEN" >"$state/hf-token"
umask 022

say() { echo "$(date -u +%FT%TZ) guard: $*" | tee -a "$state/guard.log" >&2; }

terminate() {
    if [ -z "${RUNPOD_API_KEY:-}" ] || [ -z "${RUNPOD_POD_ID:-}" ]; then
        say "no key of the pod's own"
        return 1
    fi
    # the header comes through a pipe: a command line can be read by every process
    printf 'header = "Authorization: Bearer %s"\n' "$RUNPOD_API_KEY" |
        curl -fsS -o /dev/null --max-time 30 -K - -X DELETE "${H3_POD_API:-}/pods/$RUNPOD_POD_ID" && return 0
    say "the API did not take it; trying runpodctl"
    runpodctl remove pod "$RUNPOD_POD_ID"
}

leave() {
    say "$1"
    kill -TERM -- "-$child" 2>/dev/null || kill -TERM "$child" 2>/dev/null
    tmux -S "$state/tmux" kill-server 2>/dev/null
    exit "$2"
}

set -m # the command gets a process group of its own, so that all of it can be ended
env -u HF_TOKEN "$@" &
child=$!
set +m
trap 'leave "asked to stop" 143' TERM INT

while kill -0 "$child" 2>/dev/null; do
    left=$(($(cat "$state/expires") - $(date +%s)))
    if [ "$left" -le 0 ]; then
        say "time is up"
        if terminate; then leave "the pod is terminated" 0; fi
        leave "stopping the container" 0
    fi
    sleep "$((left < 5 ? left : 5))" &
    wait -n # for either of the two; unlike sleep itself, it is interrupted by a signal
done
wait "$child"
code=$?
say "the image's command ended with $code"
exit "$code"
