"""Run every kind of condition through four layouts and compare with diffusers' pipeline, after every step.

    python benchmarks/parity_tasks.py [--forms full,curve]

Tiny sets, float32 on the CPU, contract "official"; real processes over gloo. Prints a Markdown table of relative
errors. Exit code 1 where one is above 1e-4. Needs the development extras and this checkout's tests/.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / "tests")]

TOLERANCE = 1e-4


def main() -> int:
    """One row a run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--forms", default="full,curve")
    args = parser.parse_args()
    import pipeline_oracle
    import torch
    from task_runs import CASES, write_media
    from world import World

    from h3dist.checkpoint.tiny import write_tiny

    torch.set_num_threads(1)
    good = True
    with tempfile.TemporaryDirectory() as name, World(4) as world:
        folder = Path(name)
        write_media(folder)
        for number, form in enumerate(args.forms.split(",")):
            paths = write_tiny(folder / form, form)
            tiny = SimpleNamespace(paths=paths, parts=pipeline_oracle.load(paths))
            for case in CASES:
                good &= table(tiny, world, folder, form, case, heading=number == 0 and case == next(iter(CASES)))
    return 0 if good else 1


def table(tiny: SimpleNamespace, world: object, folder: Path, form: str, case: str, *, heading: bool) -> bool:
    """The rows of one case, on every layout."""
    from task_runs import (
        CASES,
        LAYOUTS,
        fields_of,
        latent_errors,
        official,
        output_errors,
        overrides_of,
        run_stages,
    )

    wanted = official(tiny.parts, CASES[case], folder)
    given = overrides_of(tiny.paths, "sampler=official"), fields_of(CASES[case], folder)
    good = True
    for layout, (sp, tp) in LAYOUTS.items():
        found = world.run(run_stages, *given, sp, tp, ranks=sp * tp, limit=300)[0]
        errors = latent_errors(found, wanted) | output_errors(tiny.paths, found, wanted)
        if heading and layout == "single":
            print("| form | conditions | layout | " + " | ".join(errors) + " |\n" + "|---" * (3 + len(errors)) + "|")
        told = " | ".join(f"{'BAD ' * (value > TOLERANCE)}{value:.1e}" for value in errors.values())
        print(f"| {form} | {case} | {layout} | {told} |", flush=True)
        good &= max(errors.values()) <= TOLERANCE
    return good


if __name__ == "__main__":
    sys.exit(main())
