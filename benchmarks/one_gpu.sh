#!/usr/bin/env bash
# One GPU, one call of ten minutes: at the three shapes each part alone, every attention backend that is installed, the
# plain step, the fused one, weights made dense ahead, flash-attn-4, FP8 and int8 products, beside diffusers' transformer.
#   benchmarks/one_gpu.sh [FILE.json]        FILE: by default beside the results, with the GPU's name and the date
#   BLOCKS=50 LIMIT=3000 benchmarks/one_gpu.sh        the whole model; 20 of its 50 blocks fit the ten minutes
#   SMOKE=1 benchmarks/one_gpu.sh /tmp/smoke.json     a small model on the CPU: does it all run?
# Then the marked tests, which say whether the figures are of right results.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
if [[ -n ${SMOKE:-} ]]; then
    sizes=(--size small --device cpu --shape 96x64x5 --text-rows 20 --repeats 1 --blocks 2)
    out=${1:?a file for the figures}
else
    sizes=(--blocks "${BLOCKS:-20}" --repeats 5 --limit "${LIMIT:-480}")
    name=$("$python" -c "import torch; print(torch.cuda.get_device_name().replace(' ', '-').lower())")
    out=${1:-benchmarks/results/$name-variants-$(date +%F).json}
fi
"$python" -m h3dist bench "${sizes[@]}" --variants --diffusers --out "$out"
if [[ -z ${SMOKE:-} ]]; then
    "$python" -m pytest -q -m gpu tests/test_attention.py tests/test_model_fused.py tests/test_model_narrow.py
fi
