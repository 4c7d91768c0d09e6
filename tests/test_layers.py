"""The house has one direction: each layer imports only earlier ones, and a few imports are kept apart."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "h3dist"
LAYERS = [
    {"errors", "geometry", "conditions", "fitting", "status", "outputs", "provenance", "tiles", "spread", "clips"},
    {"request", "config"},
    {"topology", "packing", "checkpoint", "fp8"},
    {"plan"},
    {"comm", "attention"},
    {"model", "sampling", "text", "vae", "media", "saved", "compare"},
    {"preflight", "planner", "relief", "intake", "material", "job", "site", "progress", "sidecar"}
    | {"attending", "fusing"},
    {"deliver", "decoding", "encoding", "records", "conditioning", "tiny"},
    {"pipeline"},
    {"workers", "processes", "torchrun"},
    {"generate", "bench", "matrix", "serve", "service", "cloud", "report", "doctor"},
    {"launcher", "extend"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def part_of(path: Path) -> str:
    """The name in LAYERS that a source file belongs to."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "tiny" if parts == ("checkpoint", "tiny") else parts[0]


def imported_parts(path: Path) -> set[str]:
    """Every part of this package that a file imports, late imports included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "h3dist":
            base = node.module.split(".")[1:]
            names = [base] if base else [[alias.name] for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [a.name.split(".")[1:] for a in node.names if a.name.startswith("h3dist.")]
        for name in names:
            found.add("tiny" if name[:2] == ["checkpoint", "tiny"] else name[0])
    return found - {"__version__"}


def source_files() -> list[Path]:
    return [
        path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "__main__.py" and path != PACKAGE / "__init__.py"
    ]


def test_every_part_has_a_layer() -> None:
    assert {part_of(path) for path in source_files()} <= LEVEL.keys()


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    own = part_of(path)
    upward = {part for part in imported_parts(path) if part != own and LEVEL[part] >= LEVEL[own]}
    same_layer = {part for part in upward if LEVEL[part] == LEVEL[own]}
    assert upward - same_layer == set(), f"{own} imports later parts"


def test_only_the_comm_module_talks_to_other_ranks() -> None:
    users = {part_of(path) for path in source_files() if "torch.distributed" in path.read_text()}
    assert users <= {"comm", "torchrun", "generate"}


def test_only_topology_reads_rank_variables() -> None:
    users = {part_of(p) for p in source_files() if '"LOCAL_RANK"' in p.read_text() or '"WORLD_SIZE"' in p.read_text()}
    assert users <= {"topology"}


@pytest.mark.parametrize("module", ["plan", "preflight", "planner", "cli", "launcher", "request", "config", "topology"])
def test_planning_needs_no_torch(module: str) -> None:
    code = f"import sys, h3dist.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_rank_imports_neither_transformers_nor_diffusers() -> None:
    code = "import sys, h3dist.pipeline; sys.exit(bool({'transformers', 'diffusers', 'av'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
