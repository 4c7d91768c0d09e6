# Sourced by the other scripts: `set_up run|dev` makes the repository's own .venv and gives $root and $venv.
# A second call is quick: it looks at a stamp of pyproject.toml and constraints.txt. PYTHON names an interpreter.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv

new_enough() { # does this interpreter run, and is it Python 3.11 or newer?
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() { # prints the first interpreter that is new enough
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python python3.14 python3.13 python3.12 python3.11; do
        if new_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    echo "h3dist needs Python 3.11 or newer; python3 here is $(python3 --version 2>&1 | head -n 1)." >&2
    echo "Install one, or name it: PYTHON=/path/to/python3.11 $0" >&2
    return 1
}

make_venv() {
    local python
    python=$(find_python)
    echo "h3dist: setting up $venv with $("$python" --version)" >&2
    if ! "$python" -m venv --clear "$venv" >&2; then
        echo "h3dist: $python cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv" >&2
        return 1
    fi
}

stamp_of() { # prints what the installed set depends on: this folder, this Python, and the two files
    "$venv/bin/python" - "$root" <<'PY'
import hashlib, pathlib, sys

root = pathlib.Path(sys.argv[1])
parts = [str(root), sys.version, *((root / name).read_text() for name in ("pyproject.toml", "constraints.txt"))]
print(hashlib.sha256("\0".join(parts).encode()).hexdigest())
PY
}

set_up() { # set_up run: the package; set_up dev: with what the tests need, which is the package too
    local kind=$1 stamp target=$root
    new_enough "$venv/bin/python" || make_venv
    stamp=$(stamp_of)
    if grep -qsx "$stamp" "$venv/.h3dist-$kind" "$venv/.h3dist-dev"; then
        return
    fi
    [ "$kind" = run ] || target="$root[$kind]"
    echo "h3dist: installing into $venv" >&2
    "$venv/bin/python" -m pip install --quiet --constraint "$root/constraints.txt" torch
    "$venv/bin/python" -m pip install --quiet --constraint "$root/constraints.txt" --editable "$target"
    echo "$stamp" >"$venv/.h3dist-$kind"
}
