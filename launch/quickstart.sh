#!/usr/bin/env bash
# Set-up, tiny random checkpoints, and a clip made by two CPU ranks; prints the MP4's path. No GPU, no real weights.
# The files go to outputs/quickstart in the repository, or to the folder H3_QUICKSTART_DIR.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

if [ $# -gt 0 ]; then
    sed -n 's/^# //p' "${BASH_SOURCE[0]}" >&2
    [ "$1" = --help ] || [ "$1" = -h ] || exit 2
    exit 0
fi
set_up run
folder=${H3_QUICKSTART_DIR:-$root/outputs/quickstart}
mkdir -p "$folder"
cd "$folder"
"$venv/bin/h3dist" tiny tiny >/dev/null
overrides=()
while IFS= read -r line; do
    overrides+=("${line//@/tiny}")
done <tiny/overrides.txt
"$venv/bin/h3dist" generate "A small boat on a calm lake at dawn; water laps against the wood." \
    --gpus 2 --mode ulysses -o quickstart.mp4 "${overrides[@]}" \
    request.width=192 request.height=128 request.frames=39 request.steps=4 request.seed=7
