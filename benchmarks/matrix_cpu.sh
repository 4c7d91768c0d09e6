#!/usr/bin/env bash
# The whole matrix on CPU ranks, with a crash and a hang planted, and its report with pictures.
#   benchmarks/matrix_cpu.sh [RESULTS.json [REPORT FOLDER]]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
results=${1:-benchmarks/results/matrix-cpu.json}
nice "$python" benchmarks/matrix_cpu.py "$results"
"$python" -m h3dist report "$results" -o "${2:-${results%.json}}"
