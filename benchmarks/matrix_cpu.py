"""The whole matrix on CPU ranks: 1, 2, 4, 6, 8 ranks x 2 shapes x 3 layouts, a crash and a hang planted among them.

    python benchmarks/matrix_cpu.py [RESULTS]

Ends by itself within some minutes on two cores. Says whether every cell but the planted ones is done, whether the
JSON is what its schema says, and how far the layouts' latents are from one rank's. Exit code 0: all is as it should.
"""

import json
import sys
from pathlib import Path

import jsonschema

ROOT = Path(__file__).parent.parent
PLANTED = {"tensor 4": ("crash", 600), "hybrid 6": ("hang", 20)}
EXPECTED = {"tensor 4": "failed", "hybrid 6": "timeout"}
TOLERANCE = 1e-5  # relative, float32


def main() -> int:
    """Run the matrix, then judge its JSON."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # the plants are the tests'
    from planted import run_planted

    results = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "benchmarks" / "results" / "matrix-cpu.json")
    results.parent.mkdir(parents=True, exist_ok=True)
    axes = ["layouts=[ulysses,tensor,hybrid]", "worlds=[1,2,4,6,8]", "shapes=[192x128x39,256x160x56]"]
    shared = ["matrix=smoke", "name=cpu", "runtime.device=cpu", "save_latents=false", "cell_seconds=600"]
    run_planted([*shared, *axes, f"results={results}"], PLANTED)
    document = json.loads(results.read_text(encoding="utf-8"))
    jsonschema.validate(document, json.loads((ROOT / "h3dist/matrix/schema.json").read_text(encoding="utf-8")))
    wrong = [cell["name"] for cell in document["cells"] if not as_due(cell)]
    print(f"{len(document['cells'])} cells, valid; not as they should be: {', '.join(wrong) or 'none'}")
    return int(bool(wrong) or not document["finished"])


def as_due(cell: dict) -> bool:
    """Planted cells ended as planted; the others are skipped for a reason, or done with the bytes and latents due."""
    due = EXPECTED.get(f"{cell['asked']} {cell['ranks']}")
    if due or cell["state"] != "done":
        return cell["state"] == (due or "skipped")
    return cell["bytes"]["as_planned"] and cell["parity"]["relative_error"] < TOLERANCE


if __name__ == "__main__":
    sys.exit(main())
