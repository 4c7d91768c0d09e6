#!/usr/bin/env bash
# The measured run on the GPUs of one machine: scaling, diffusers beside it, parity, ranks that die, ways to exchange.
#
#   benchmarks/multi_gpu.sh RESULTS [ranks...]      (by default 1 2 4 6 8, as far as there are GPUs)
#
# Ends by itself within H3_SECONDS (540) with exit code 75 and says so; called again it goes on where it was, until all
# is done. The most valuable comes first: scaling rivals parity leave environment exchange alone decode clips, and each
# call ends in a report; H3_STAGES picks among them. What fails twice is left. H3_ATTENTION=flash4 names the attention of
# scaling's cells; H3_RIVAL_BLOCKS=N gives diffusers N of its 50 blocks, and scales its step.
# RESULTS/out holds JSON and Markdown alone; RESULTS/out.tar.gz is that and what is needed to go on elsewhere: unpack it
# in RESULTS. Latents are hashed and dropped, unless H3_SAVE_LATENTS=1 keeps them in RESULTS/latents.
# Without a GPU all of it runs on the processor over gloo, on a small model and tiny clips: a rehearsal.
#
# "clips" needs checkpoints: H3_MODEL_PATH and the other variables, or their default places. It looks into the denoiser,
# holds one rank of Ulysses against one of tensor, and makes the reference clip, from text and between two frames.
# NVLink multicast stays off in every process.
set -uo pipefail
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || { sed -n '2,19s/^# \{0,1\}//p' "$0" && exit 2; }
results=$(mkdir -p "$1" && cd "$1" && pwd) && shift
ranks=("$@") && [ $# -gt 0 ] || ranks=(1 2 4 6 8)
python=${PYTHON:-python3}
limit=${H3_SECONDS:-540}
attention=${H3_ATTENTION:-sdpa}
order=(scaling rivals parity leave environment exchange alone decode clips)
stages=${H3_STAGES:-${order[*]} report}
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export H3_SAVE_LATENTS=${H3_SAVE_LATENTS:-0}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
out=$results/out waited=()
mkdir -p "$results/done" "$results/logs" "$results/latents" "$out"

gpus=$("$python" -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -gt 0 ]; then
    kept=() && for count in "${ranks[@]}"; do [ "$count" -le "$gpus" ] && kept+=("$count"); done
    ranks=(${kept[@]+"${kept[@]}"})
    size=released place=() odd=224x160x39 dtypes=(float32 bfloat16) copied=,heads+copy,heads/4+copy copy=+copy
    shapes=(1344x768x124/4 864x480x141/4 1344x768x243/2) # with evaluations, the first of which warms up
    rival=(--steps 3 ${H3_RIVAL_BLOCKS:+--blocks "$H3_RIVAL_BLOCKS"}) hang=8
else
    export OMP_NUM_THREADS=1
    size=small place=(runtime.device=cpu runtime.threads=1) odd=96x64x5 dtypes=(float32) copied= copy= # between GPUs alone
    shapes=(96x64x22/3 64x64x5/3 96x64x39/2)
    rival=(--steps 2) hang=20
fi
[ ${#ranks[@]} -gt 0 ] || { echo "none of these numbers of ranks: $gpus GPUs" && exit 2; }
worlds="worlds=[$(IFS=, && echo "${ranks[*]}")]"
most=$(printf '%s\n' "${ranks[@]}" | sort -n | tail -n 1)
several=() && for count in "${ranks[@]}"; do [ "$count" -gt 1 ] && several+=("$count"); done

report() {
    local file found=()
    for file in "$out"/{scaling,rivals,parity-*,exchange,leave-*,clips}.json; do
        [ -s "$file" ] && found+=("$file")
    done
    [ ${#found[@]} -gt 0 ] || return 0
    "$python" -m h3dist report "${found[@]}" >"$out/report.md" && echo "$out/report.md"
}

leave_off() { # what was measured goes together, however this ends
    [[ " $stages " == *" report "* ]] && report
    for folder in "$out"/*.latents; do
        [ -d "$folder" ] && rm -rf "$results/latents/${folder##*/}" && mv "$folder" "$results/latents/"
    done
    tail -n 40 "$results"/logs/*.log >"$out/logs.md" 2>/dev/null
    tar -czf "$results/out.tar.gz" -C "$results" out done && echo "$((SECONDS)) s; $results/out.tar.gz, $(
        stat -c %s "$results/out.tar.gz") bytes"
}
trap leave_off EXIT
for folder in "$results/latents"/*.latents; do [ -d "$folder" ] && mv "$folder" "$out/"; done

stop() { # stop WORDS: the next call goes on
    echo "time is up: call again for $*"
    exit 75
}

once() { # once NAME COMMAND...: unless it is done; a second failure is left
    local name=$1 left=$((limit - SECONDS)) begun=$SECONDS code && shift
    [ -e "$results/done/$name" ] && return
    [ "$left" -ge 20 ] || stop "$name and what follows"
    timeout -k 20 "$left" "$@" </dev/null > >(tee -a "$results/logs/$name.log" |
        grep --line-buffered "^h3dist: " | grep --line-buffered -v ": skipped: ") 2>&1
    code=$?
    echo "$name: $([ $code -eq 0 ] && echo done || echo "ended with $code") in $((SECONDS - begun)) s, at $SECONDS s; $(
        grep -v '^$' "$results/logs/$name.log" | tail -n 1 | cut -c1-160)"
    if [ $code -eq 75 ] || [ $code -eq 124 ] || [ $code -eq 137 ] || [ $code -eq 143 ]; then
        stop "the rest of $name"
    elif [ $code -eq 0 ] || [ -e "$results/logs/$name.failed" ]; then
        echo "$code" >"$results/done/$name"
    else
        touch "$results/logs/$name.failed"
    fi
}

matrix() { # matrix NAME FILE WORDS...: cells that are done are kept in the file; those of a layout share a start
    local name=$1 file=$2 left=$((limit - SECONDS - 10)) && shift 2
    once "$name" "$python" -m h3dist matrix "$worlds" cell_seconds=240 total_seconds=$((left > 1 ? left : 1)) \
        results="$out/$file.json" ${place[@]+"${place[@]}"} "$@"
}

random() { # random NAME FILE WORDS...: the same on random weights
    local name=$1 file=$2 && shift 2
    matrix "$name" "$file" matrix=scaling together=true "$@"
}

torchrun() { # torchrun NAME RANKS SCRIPT ARGUMENTS...
    local name=$1 count=$2 && shift 2
    once "$name" "$python" -m torch.distributed.run --standalone --nproc-per-node "$count" "$@"
}

listed() { # listed WORDS...: a list for an override
    local IFS=,
    echo "[$(printf "'%s'," "$@" | sed 's/,$//')]"
}

environment() {
    once environment bash -c '
        nvidia-smi topo -m >"$1/topology.md" 2>&1
        timeout 60 "$2" -m h3dist doctor --json --record "$1/topology.json" >"$1/doctor.json" 2>/dev/null || true' - "$out" "$python"
}

beside() { # beside COMMAND...: while others like it run, on GPUs; nothing of it is timed
    ("$@") &
    waited+=($!)
    [ "$gpus" -gt 0 ] || joined
}

joined() { # all that runs beside has ended
    local one late=
    for one in ${waited[@]+"${waited[@]}"}; do
        wait "$one" || late=yes
    done
    waited=()
    [ -z "$late" ] || stop "the rest"
}

parity() { # odd sizes; every layout and every way to exchange against one rank, twice
    local dtype
    for dtype in "${dtypes[@]}"; do
        beside random "parity-$dtype" "parity-$dtype" name=parity size=small text_rows=41 "shapes=[$odd]" request.steps=4 repeats=2 \
            runtime.dtype="$dtype" "attentions=[sdpa]" "layouts=[single,ulysses,tensor,hybrid]" \
            "exchanges=[heads,heads/3,hidden,hidden/3$copied]"
    done
    joined
}

scaling() { # of each shape the ways that matter most; ranks that share a layout start once for all shapes
    local shape=${shapes[0]} short=${shapes[1]} long=${shapes[2]} count cells=("${shapes[0]} single 1")
    for count in ${several[@]+"${several[@]}"}; do
        cells+=("$shape ulysses $count" "$shape ulysses $count heads/4$copy" "$shape ulysses $count hidden/4$copy")
        cells+=("$short ulysses $count hidden/4$copy" "$long ulysses $count hidden/4$copy" "$short ulysses $count")
        cells+=("$shape tensor $count") && [ "$count" -gt 3 ] && cells+=("$shape hybrid $count")
    done
    cells+=("$short single 1" "$long single 1")
    random scaling scaling size=$size "attentions=[$attention]" "cells=$(listed "${cells[@]}")"
}

exchange() { # beside scaling's cells, in the same file, so that gains are over the same single rank
    local count way cells=("${shapes[0]} single 1")
    for count in ${several[@]+"${several[@]}"}; do
        for way in heads/4 hidden hidden/4 ${copy:+heads$copy hidden$copy} auto${copy:++auto}; do
            cells+=("${shapes[0]} ulysses $count $way")
        done
    done
    [ ${#several[@]} -eq 0 ] || random exchange scaling size=$size "attentions=[$attention]" \
        "cells=$(listed "${cells[@]}")"
}

alone() { # one block's exchange: ours, even and uneven collectives, fast-ulysses
    local shape count
    for shape in "${shapes[@]:0:2}"; do
        for count in ${several[@]+"${several[@]}"}; do
            torchrun "alone-${shape%/*}-$count" "$count" benchmarks/exchange.py --shape "${shape%/*}" --size $size \
                --json "$out/exchange.json"
        done
    done
}

rivals() { # diffusers' transformer of the same size, and its Ulysses: at the first shape, most ranks first
    local count
    for count in $(printf '%s\n' "${ranks[@]}" | sort -nr); do
        torchrun "rivals-${shapes[0]%/*}-$count" "$count" benchmarks/diffusers_ulysses.py --shape "${shapes[0]%/*}" \
            --size $size "${rival[@]}" --json "$out/rivals.json"
    done
}

leave() {
    local how
    [ "$most" -gt 1 ] || return 0
    for how in killed hung; do
        beside once "leave-$how" "$python" benchmarks/leave.py --ranks "$most" --how $how --timeout $hang \
            --json "$out/leave-$how.json" ${place[@]+"${place[@]}"} "shapes=[$odd]"
    done
    joined
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

for stage in $stages; do
    [[ " ${order[*]} report " == *" $stage "* ]] || { echo "H3_STAGES: no $stage; there are ${order[*]} report" && exit 2; }
done
for stage in "${order[@]}"; do
    [[ " $stages " != *" $stage "* ]] || "$stage"
done
for name in "$results"/logs/*.failed; do
    [ -e "$name" ] && name=$(basename "$name" .failed) && [ ! -e "$results/done/$name" ] && again=yes
done
[ -z "${again:-}" ] || { echo "call again: what failed is tried once more" && exit 75; }
failed=$(grep -Lx 0 "$results"/done/* 2>/dev/null | xargs -rn 1 basename | tr '\n' ' ')
echo "all done${failed:+, but for: $failed}"
[ -z "$failed" ]
