#!/usr/bin/env bash
# One GPU, one call of ten minutes: the marked tests, which say whether what follows is of right results; then at the
# three shapes each part alone, every attention backend that is installed, the plain step, diffusers' transformer, and
# steps done otherwise: fused, with weights made dense in one memory alone, by flash-attn-4, on FP8 and int8 products.
#   benchmarks/one_gpu.sh [FILE.json]        FILE: by default among the results, with the GPU's name and the date
#   BLOCKS=50 LIMIT=3600 benchmarks/one_gpu.sh        the whole model; 10 of its 50 blocks fit the ten minutes
#   SMOKE=1 benchmarks/one_gpu.sh /tmp/smoke.json     a small model on the CPU: does it all run?
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
if [[ -n ${SMOKE:-} ]]; then
    exec "$python" -m h3dist bench --size small --device cpu --shape 96x64x5 --text-rows 20 --repeats 1 --blocks 2 \
        --variants all --diffusers --out "${1:?a file for the figures}"
fi
name=$("$python" -c "import torch; print(torch.cuda.get_device_name().replace(' ', '-').lower())")
out=${1:-benchmarks/results/$name-variants-$(date +%F).json}
"$python" -m pytest -q -m gpu tests/test_model_fused.py tests/test_model_narrow.py tests/test_model_offload.py \
    tests/test_attention.py || echo "FAILED"
"$python" -m h3dist bench --blocks "${BLOCKS:-10}" --repeats 5 --limit $((${LIMIT:-560} - SECONDS)) \
    --variants all --diffusers --out "$out"
