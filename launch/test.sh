#!/usr/bin/env bash
# Set-up, then every test that needs no GPU. Arguments go to pytest: launch/test.sh tests/test_geometry.py -k frames
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    sed -n '2s/^# //p' "${BASH_SOURCE[0]}"
    exit 0
fi
set_up dev
cd "$root"
exec "$venv/bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
