#!/usr/bin/env bash
# One clip from a prompt on the GPUs of this machine, at the reference cell: 864x480, 141 frames, 12 steps.
#
#   launch/run_distributed_t2va.sh ulysses|tensor|hybrid [N] [attention] [-- h3dist generate arguments]
#
# N: how many GPUs, all visible ones without it. The prompt is PROMPT, or the text in PROMPT_FILE, or a default.
# The clip is H3_OUTPUT_PATH, by default h3dist-MODE.mp4 in the current folder. A --request or preset= among the
# arguments takes the place of the reference cell. H3DIST names the command, by default that of the own .venv.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

usage() {
    sed -n 's/^# \{0,1\}//p' "${BASH_SOURCE[0]}" | tail -n +2 >&2
    exit "$1"
}

case ${1:-} in
    "" | --) usage 2 ;;
    -h | --help) usage 0 ;;
    *) mode=$1 && shift ;;
esac
gpus=auto
if [[ ${1:-} =~ ^([0-9]+|auto)$ ]]; then
    gpus=$1 && shift
fi
attention=()
if [ $# -gt 0 ] && [ "$1" != -- ]; then
    attention=(--attention "$1") && shift
fi
if [ $# -gt 0 ]; then
    [ "$1" = -- ] || usage 2
    shift
fi
if [ -n "${PROMPT:-}" ] && [ -n "${PROMPT_FILE:-}" ]; then
    echo "h3dist: PROMPT and PROMPT_FILE are both set; keep one of them" >&2
    exit 2
fi

default_prompt='A quiet medium shot of a woman by a rain-streaked window. She says, "We should leave before dawn."'
request=() preset=(preset=reference)
if [[ " $* " == *" --request"* ]]; then
    preset=()
elif [ -n "${PROMPT_FILE:-}" ]; then
    request=(--prompt-file "$PROMPT_FILE")
else
    exec 3< <(printf '%s\n' "${PROMPT:-$default_prompt}") # a file, so that no text is taken for an option
    request=(--prompt-file /dev/fd/3)
fi
if [[ " $* " == *" preset="* ]]; then
    preset=()
fi

if [ -z "${H3DIST:-}" ]; then
    set_up run
    H3DIST=$venv/bin/h3dist
fi
export H3_OUTPUT_PATH=${H3_OUTPUT_PATH:-h3dist-$mode.mp4}
exec "$H3DIST" generate --mode "$mode" --gpus "$gpus" ${attention[@]+"${attention[@]}"} \
    ${request[@]+"${request[@]}"} ${preset[@]+"${preset[@]}"} "$@"
