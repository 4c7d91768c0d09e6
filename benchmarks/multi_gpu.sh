#!/usr/bin/env bash
# Parity and scaling over NCCL on random NVFP4 weights. One JSON line a run, in RESULTS; a run that is there is kept,
# so a second call goes on where the first was ended.
#   benchmarks/multi_gpu.sh RESULTS [ranks...]      (by default 1 2 4 6 8, as far as there are GPUs)
set -uo pipefail
cd "$(dirname "$0")/.."
results=$1 && shift
ranks=("$@") && [ $# -gt 0 ] || ranks=(1 2 4 6 8)
python=${PYTHON:-python3}
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
export OMP_NUM_THREADS=4 NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
mkdir -p "$results"
nvidia-smi topo -m >"$results/topology.txt" 2>&1
"$python" -c 'import torch; print(torch.__version__, torch.cuda.nccl.version())' >"$results/versions.txt"

run() { # run NAME RANKS ARGUMENTS...
    local name=$1 count=$2 && shift 2
    [ -s "$results/$name.json" ] && return
    [ "$count" -le "$gpus" ] || { echo "$name: skipped, $gpus GPUs" && return; }
    timeout "${H3_CELL_SECONDS:-240}" "$python" -m torch.distributed.run --standalone --nproc-per-node "$count" \
        benchmarks/step.py "$@" >"$results/$name.part" 2>"$results/$name.log"
    local code=$?
    if [ $code -eq 0 ]; then
        grep '^{' "$results/$name.part" >"$results/$name.json" && rm "$results/$name.part" "$results/$name.log"
        "$python" - "$results/$name.json" <<'PY'
import json, sys
row = json.load(open(sys.argv[1]))
keys = ("mode", "ranks", "rows", "dtype", "median_step_seconds", "peak_bytes", "sent_as_planned", "relative_error")
print({key: row[key] for key in keys if key in row}, row["sha256"][:12], flush=True)
PY
    else
        echo "$name: failed with $code; $(tail -n 1 "$results/$name.log" | cut -c1-200)"
    fi
}

small=(--size small --canvas 224x160 --frames 39 --steps 4)
for dtype in float32 bfloat16; do # parity first: odd sizes, every layout against one rank
    run "parity-$dtype-single" 1 "${small[@]}" --dtype "$dtype" --mode single --save "$results/$dtype.pt"
    for count in "${ranks[@]}"; do
        [ "$count" -gt 1 ] || continue
        for mode in ulysses tensor; do
            run "parity-$dtype-$mode-$count" "$count" "${small[@]}" --dtype "$dtype" --mode $mode --against "$results/$dtype.pt"
        done
        [ $((count % 2)) -eq 0 ] && [ "$count" -gt 2 ] && run "parity-$dtype-hybrid-$count" "$count" "${small[@]}" \
            --dtype "$dtype" --mode hybrid --sp $((count / 2)) --tp 2 --against "$results/$dtype.pt"
    done
done
for shape in 864x480/141/6 1344x768/124/5 1344x768/243/3; do
    IFS=/ read -r canvas frames steps <<<"$shape"
    for count in "${ranks[@]}"; do
        cell=(--canvas "$canvas" --frames "$frames" --steps "$steps")
        if [ "$count" -eq 1 ]; then
            run "$canvas-$frames-single-1" 1 "${cell[@]}" --mode single
            continue
        fi
        run "$canvas-$frames-ulysses-$count" "$count" "${cell[@]}" --mode ulysses
        run "$canvas-$frames-tensor-$count" "$count" "${cell[@]}" --mode tensor
        [ $((count % 2)) -eq 0 ] && [ "$count" -gt 2 ] && \
            run "$canvas-$frames-hybrid-$count" "$count" "${cell[@]}" --mode hybrid --sp $((count / 2)) --tp 2
    done
done
exit 0
