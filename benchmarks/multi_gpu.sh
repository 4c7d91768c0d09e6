#!/usr/bin/env bash
# The measured run on the GPUs of one machine: parity, scaling, ways to exchange, ranks that die, diffusers beside it.
#
#   benchmarks/multi_gpu.sh RESULTS [ranks...]      (by default 1 2 4 6 8, as far as there are GPUs)
#
# Ends by itself within H3_CALL_SECONDS (540) and says so; called again it goes on where it was, until all is done.
# H3_STAGES picks among: environment parity scaling rivals exchange alone leave decode clips report. What fails twice
# is left, with its log in RESULTS/logs. H3_ATTENTION names the attention of all cells, as in H3_ATTENTION=flash4.
# All JSON files in RESULTS are read by `h3dist report`, whose text is report.md.
# Without a GPU all of it runs on the processor over gloo, on a small model and tiny clips: a rehearsal.
#
# "clips" needs checkpoints: H3_MODEL_PATH and the other variables, or their default places. It looks into the denoiser,
# holds one rank of Ulysses against one of tensor, and makes the reference clip, from text and between two frames.
# NVLink multicast stays off in every process.
set -uo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || { sed -n '2,15s/^# \{0,1\}//p' "$0" && exit 2; }
results=$(mkdir -p "$1" && cd "$1" && pwd) && shift
ranks=("$@") && [ $# -gt 0 ] || ranks=(1 2 4 6 8)
python=${PYTHON:-python3}
limit=${H3_CALL_SECONDS:-540}
attention=${H3_ATTENTION:-sdpa}
stages=${H3_STAGES:-environment parity scaling rivals exchange alone leave decode clips report}
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$results/done" "$results/logs"

gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -gt 0 ]; then
    kept=() && for count in "${ranks[@]}"; do [ "$count" -le "$gpus" ] && kept+=("$count"); done
    ranks=(${kept[@]+"${kept[@]}"})
    size=released place=() odd=224x160x39 dtypes=(float32 bfloat16) copied=,heads+copy,heads/4+copy
    shapes=(864x480x141/6 1344x768x124/5 1344x768x243/3) # with evaluations, the first of which warms up
else
    export OMP_NUM_THREADS=1
    size=small place=(runtime.device=cpu runtime.threads=1) odd=96x64x5 dtypes=(float32) copied= # between GPUs alone
    shapes=(64x64x5/3 96x64x22/2)
fi
[ ${#ranks[@]} -gt 0 ] || { echo "none of these numbers of ranks: $gpus GPUs" && exit 2; }
worlds="worlds=[$(IFS=, && echo "${ranks[*]}")]"
most=$(printf '%s\n' "${ranks[@]}" | sort -n | tail -n 1)
several=() && for count in "${ranks[@]}"; do [ "$count" -gt 1 ] && several+=("$count"); done

once() { # once NAME COMMAND...: unless it is done; a second failure is left
    local name=$1 left=$((limit - SECONDS)) begun=$SECONDS code && shift
    [ -e "$results/done/$name" ] && return
    [ "$left" -ge 20 ] || { echo "time is up: call again for $name and what follows" && exit 75; }
    timeout -k 20 "$left" "$@" </dev/null >>"$results/logs/$name.log" 2>&1
    code=$?
    echo "$name: $([ $code -eq 0 ] && echo done || echo "ended with $code") in $((SECONDS - begun)) s; $(
        grep -v '^$' "$results/logs/$name.log" | tail -n 1 | cut -c1-160)"
    if [ $code -eq 124 ] || [ $code -eq 137 ] || [ $code -eq 143 ]; then
        echo "time is up: call again for the rest of $name" && exit 75
    elif [ $code -eq 0 ] || [ -e "$results/logs/$name.failed" ]; then
        echo "$code" >"$results/done/$name"
    else
        touch "$results/logs/$name.failed"
    fi
}

matrix() { # matrix NAME FILE WORDS...: cells that are done are kept in the file
    local name=$1 file=$2 && shift 2
    once "$name" "$python" -m h3dist matrix "$worlds" cell_seconds=240 results="$results/$file.json" \
        "attentions=[$attention]" ${place[@]+"${place[@]}"} "$@"
}

torchrun() { # torchrun NAME RANKS SCRIPT ARGUMENTS...
    local name=$1 count=$2 && shift 2
    once "$name" "$python" -m torch.distributed.run --standalone --nproc-per-node "$count" "$@"
}

environment() {
    once environment bash -c '
        nvidia-smi topo -m >"$1/topology.txt" 2>&1
        "$2" -c "import torch; print(torch.__version__, torch.version.cuda)" >"$1/versions.txt"
        "$2" -m h3dist doctor --json --record "$1/topology.json" >"$1/doctor.txt" 2>&1 || true' - "$results" "$python"
}

parity() { # odd sizes; every layout against one rank, twice, and every way to exchange
    local dtype small=(matrix=scaling name=parity size=small text_rows=41 "shapes=[$odd]" request.steps=4)
    for dtype in "${dtypes[@]}"; do
        matrix "parity-$dtype" parity "${small[@]}" runtime.dtype="$dtype" repeats=2 \
            "layouts=[single,ulysses,tensor,hybrid]"
        [ ${#several[@]} -eq 0 ] || matrix "parity-$dtype-exchange" parity "${small[@]}" runtime.dtype="$dtype" \
            "layouts=[single,ulysses,hybrid]" "exchanges=[heads,heads/3,hidden,hidden/3$copied]"
    done
}

scaling() {
    local shape
    for shape in "${shapes[@]}"; do
        matrix "scaling-${shape%/*}" scaling matrix=scaling size=$size "shapes=[${shape%/*}]" request.steps="${shape#*/}"
    done
}

exchange() { # beside scaling's cells, in the same file, so that gains are over the same single rank
    local shape
    [ ${#several[@]} -gt 0 ] || return 0
    for shape in "${shapes[@]:0:2}"; do
        matrix "exchange-${shape%/*}" scaling matrix=scaling size=$size "shapes=[${shape%/*}]" \
            request.steps="${shape#*/}" "layouts=[single,ulysses]" "exchanges=[heads,heads/4,heads/7,hidden,hidden/4,auto$copied]"
    done
}

alone() { # one block's exchange: ours, even and uneven collectives, fast-ulysses
    local shape count
    for shape in "${shapes[@]:0:2}"; do
        for count in ${several[@]+"${several[@]}"}; do
            torchrun "alone-${shape%/*}-$count" "$count" benchmarks/exchange.py --shape "${shape%/*}" --size $size \
                --json "$results/exchange.json"
        done
    done
}

rivals() { # diffusers' transformer of the same size, and its Ulysses
    local shape count
    for shape in "${shapes[@]}"; do
        for count in "${ranks[@]}"; do
            torchrun "rivals-${shape%/*}-$count" "$count" benchmarks/diffusers_ulysses.py --shape "${shape%/*}" \
                --size $size --steps 3 --json "$results/rivals.json"
        done
    done
}

leave() {
    local how
    [ "$most" -gt 1 ] || return 0
    for how in killed hung; do
        once "leave-$how" "$python" benchmarks/leave.py --ranks "$most" --how $how --json "$results/leave.json" \
            ${place[@]+"${place[@]}"} "shapes=[$odd]"
    done
}

tiny() { # a set of tiny checkpoints, and its overrides in `set`
    [ -d "$results/tiny" ] || "$python" -m h3dist tiny "$results/tiny" >/dev/null
    mapfile -t set < <(grep -v '^\(runtime\|parallel\)' "$results/tiny/overrides.txt" | sed "s|@|$results/tiny|g")
}

clip() { # clip NAME RANKS ARGUMENTS...: a clip, its latents and its frames
    local name=$1 count=$2 && shift 2
    mkdir -p "$results/clips"
    once "clip-$name" "$python" -m h3dist generate "A quiet shot of the sea at dusk." -o "$results/clips/$name.mp4" \
        --gpus "$count" "output.intermediates=$results/clips/$name.safetensors" ${place[@]+"${place[@]}"} "$@"
}

same() { # same A B: is every tensor of two clips equal?
    once "same-$1-$2" "$python" -m h3dist compare "$results/clips/$1.safetensors" "$results/clips/$2.safetensors"
}

decode() { # on all ranks, against rank 0 alone: frames by their bytes
    local set word=${H3_DECODE_WORD:-decode=parallel} few=(request.width=96 request.height=64 request.frames=39 request.seed=7)
    if ! "$python" -m h3dist plan - "$word" >"$results/logs/decode.log" 2>&1; then
        echo "decode: skipped, $(tail -n 1 "$results/logs/decode.log")"
        return
    fi
    [ "$most" -gt 1 ] || return 0
    tiny
    clip decode-rank0 "$most" --mode ulysses "${set[@]}" "${few[@]}" request.steps=2
    clip decode-parallel "$most" --mode ulysses "${set[@]}" "${few[@]}" request.steps=2 "$word"
    once same-frames "$python" -c '
import sys
from safetensors.numpy import load_file
one, other = map(load_file, sys.argv[1:])
print({name: bool((one[name] == other[name]).all()) for name in ("frames", "audio")})
sys.exit(not (one["frames"] == other["frames"]).all())' "$results"/clips/decode-{rank0,parallel}.safetensors
}

clips() { # from the configured checkpoints; in a rehearsal from tiny ones
    local set=() model=${H3_MODEL_PATH:-/models/minimax_h3_fl2va_pruned_nvfp4.safetensors} shape=864x480x141 steps=12
    if [ "$gpus" -eq 0 ]; then
        tiny && model=$results/tiny/h3_tiny_nvfp4.safetensors shape=64x64x5 steps=2
    fi
    [ -f "$model" ] || { echo "clips: skipped, no checkpoint $model" && return; }
    IFS=x read -r width height frames <<<"$shape"
    local cell=(request.width="$width" request.height="$height" request.frames="$frames" request.steps=$steps
        request.seed=440420)
    once inspect "$python" -m h3dist inspect "$model"
    clip ulysses-1 1 --mode ulysses ${set[@]+"${set[@]}"} "${cell[@]}"
    clip tensor-1 1 --mode tensor ${set[@]+"${set[@]}"} "${cell[@]}"
    same ulysses-1 tensor-1
    "$python" -c '
import sys
from PIL import Image
for name, turn in (("first", 0), ("last", 90)):
    Image.linear_gradient("L").rotate(turn).convert("RGB").resize((432, 240)).save(f"{sys.argv[1]}/{name}.png")' "$results"
    local run=(matrix=clip "shapes=[$shape]" request.steps=$steps ${set[@]+"${set[@]}"} "layouts=[single,ulysses,tensor]")
    matrix clips-t2va clips "${run[@]}"
    matrix clips-fl2va clips "${run[@]}" request.first_frame="$results/first.png" request.last_frame="$results/last.png"
}

report() {
    local file found=()
    for file in parity scaling rivals exchange leave clips; do
        [ -s "$results/$file.json" ] && found+=("$results/$file.json")
    done
    [ ${#found[@]} -gt 0 ] || return 0
    "$python" -m h3dist report "${found[@]}" >"$results/report.md" && echo "$results/report.md"
}

for stage in $stages; do
    "$stage"
done
for name in "$results"/logs/*.failed; do
    [ -e "$name" ] && name=$(basename "$name" .failed) && [ ! -e "$results/done/$name" ] && again=yes
done
[ -z "${again:-}" ] || { echo "call again: what failed is tried once more" && exit 75; }
failed=$(grep -Lx 0 "$results"/done/* 2>/dev/null | xargs -rn 1 basename | tr '\n' ' ')
echo "all done${failed:+, but for: $failed}"
[ -z "$failed" ]
