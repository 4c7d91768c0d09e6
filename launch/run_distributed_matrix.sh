#!/usr/bin/env bash
# Layouts against each other on the GPUs of this machine, one fresh run a cell, into one JSON.
#
#   launch/run_distributed_matrix.sh [h3dist matrix overrides]
#
# Without overrides: single, ulysses, tensor and hybrid on 1, 2, 4, 6 and 8 GPUs at three lengths, on random weights
# of the released size; counts above the visible GPUs are skipped. matrix=one_vs_two, layouts, clip or smoke are
# others, and worlds=[1,2] repeats=2 request.steps=4 results=FILE change one. A second call goes on where the first
# was stopped. H3_SAVE_LATENTS=0 keeps hashes and errors, not the latents. H3DIST names the command, by default that
# of the own .venv.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

case ${1:-} in
    -h | --help)
        sed -n 's/^# \{0,1\}//p' "${BASH_SOURCE[0]}" | tail -n +2 >&2
        exit 0
        ;;
esac
if [ -z "${H3DIST:-}" ]; then
    set_up run
    H3DIST=$venv/bin/h3dist
fi
exec "$H3DIST" matrix "$@"
