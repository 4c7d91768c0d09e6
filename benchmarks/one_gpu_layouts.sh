#!/usr/bin/env bash
# One GPU: denoiser steps at the three shapes, then layouts that share the GPU over gloo. JSON lines on stdout.
#   benchmarks/one_gpu_layouts.sh [steps]
set -euo pipefail
cd "$(dirname "$0")/.."
steps=${1:-6}
python=${PYTHON:-python3}
run() { "$python" -m torch.distributed.run --standalone --nproc-per-node "$1" benchmarks/step.py "${@:2}"; }

for shape in 864x480/141 1344x768/124 1344x768/243; do
    "$python" benchmarks/step.py --canvas "${shape%/*}" --frames "${shape#*/}" --steps "$steps"
done

latents=$(mktemp -d)
trap 'rm -rf "$latents"' EXIT
for dtype in float32 bfloat16; do
    small=(--size small --canvas 192x128 --frames 39 --steps 4 --dtype "$dtype" --backend gloo)
    "$python" benchmarks/step.py "${small[@]}" --save "$latents/$dtype"
    for mode in ulysses tensor; do
        run 2 "${small[@]}" --mode "$mode" --against "$latents/$dtype"
        run 4 "${small[@]}" --mode "$mode" --against "$latents/$dtype"
    done
    run 4 "${small[@]}" --mode hybrid --sp 2 --tp 2 --against "$latents/$dtype"
done
