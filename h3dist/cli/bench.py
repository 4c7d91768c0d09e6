"""`h3dist bench`: what a step takes and what it is made of, measured on this machine."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from h3dist.cli.shell import Attention, Verbose, say

if TYPE_CHECKING:
    from h3dist.bench.spec import Spec


def bench(
    shape: Annotated[
        list[str] | None, typer.Option("--shape", metavar="WxHxF", help="As in 864x480x141; may be repeated.")
    ] = None,
    gpus: Annotated[int, typer.Option("--gpus", metavar="N", min=1, help="Ranks.")] = 1,
    mode: Annotated[str, typer.Option("--mode", metavar="NAME", help="Layout: ulysses, tensor, hybrid.")] = "auto",
    sp: Annotated[int | None, typer.Option("--sp", min=1, help="Of a hybrid layout.")] = None,
    tp: Annotated[int | None, typer.Option("--tp", min=1, help="Of a hybrid layout.")] = None,
    size: Annotated[str, typer.Option("--size", metavar="released|small", help="Of the model.")] = "released",
    device: Annotated[str, typer.Option("--device", metavar="auto|cuda|cpu")] = "auto",
    dtype: Annotated[str, typer.Option("--dtype", metavar="auto|bfloat16|float32")] = "auto",
    backend: Annotated[str, typer.Option("--backend", metavar="auto|nccl|gloo")] = "auto",
    attention: Attention = None,
    text_rows: Annotated[int, typer.Option("--text-rows", min=1, help="Tokens of the prompt.")] = 400,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Runs of each part that count.")] = 5,
    diffusers: Annotated[bool, typer.Option("--diffusers", help="Also diffusers' transformer, beside ours.")] = False,
    variants: Annotated[
        list[str] | None,
        typer.Option(
            "--variants",
            metavar="all|exact|fp8|int8|offload|graph|NAME",
            help="Also whole steps done otherwise; may be repeated.",
        ),
    ] = None,
    floor_only: Annotated[
        bool, typer.Option("--floor-only", help="Of the parts only products and exact attention, and no plain step.")
    ] = False,
    parts: Annotated[
        bool, typer.Option("--parts/--no-parts", help="Take a step apart, or only time whole ones.")
    ] = True,
    blocks: Annotated[int | None, typer.Option("--blocks", min=1, help="Of the model, fewer than its 50.")] = None,
    limit: Annotated[float, typer.Option("--limit", metavar="S", help="Begin no part after S seconds.")] = 440.0,
    out: Annotated[str | None, typer.Option("--out", metavar="FILE", help="Write the figures as JSON.")] = None,
    refresh: Annotated[
        str | None, typer.Option("--refresh", metavar="FILE", help="Put such figures into the table of rates.")
    ] = None,
    capture: Annotated[
        str | None, typer.Option("--capture", metavar="FOLDER", help="Judge attention on what a run saved there.")
    ] = None,
    verbose: Verbose = False,
) -> None:
    """Time a step, its products, attention, dequantisation and exchange, each alone, on random weights.

    Needs no checkpoint. Figures are medians; a part that fails is named and the others go on. `--refresh FILE` measures
    nothing: it turns the figures of an earlier run into rates that `h3dist plan` predicts with. `--capture FOLDER`
    times nothing: it tells how far each usable backend is from exact on what attention.capture=FOLDER saved of a run.
    """
    if capture is not None:
        return _judge(capture, device, out)
    if refresh is not None:
        return _refresh(refresh)
    from pathlib import Path
    from tempfile import TemporaryDirectory

    from h3dist.bench.refresh import read_record
    from h3dist.bench.spec import Spec, default_shapes
    from h3dist.bench.summary import summary

    _check({"--size": (size, ("released", "small")), "--device": (device, ("auto", "cuda", "cpu"))})
    _check({"--dtype": (dtype, ("auto", "bfloat16", "float32")), "--backend": (backend, ("auto", "nccl", "gloo"))})
    spec = Spec(
        shapes=tuple(shape or default_shapes(size)), mode=mode, sp=sp, tp=tp, size=size, dtype=dtype, device=device,
        backend=backend, attention=attention or "sdpa", text_rows=text_rows, repeats=repeats, diffusers=diffusers,
        variants=tuple(variants or ()), floor_only=floor_only, parts=parts, blocks=blocks,
        limit=limit,
    )  # fmt: skip
    with TemporaryDirectory(prefix="h3dist-bench-") as folder:
        path = Path(out).absolute() if out else Path(folder) / "bench.json"
        _measure(spec, gpus, path)
        typer.echo(summary(read_record(path)))


def _check(options: dict[str, tuple[str, tuple[str, ...]]]) -> None:
    from h3dist.errors import ConfigError, nearest

    for option, (value, choices) in options.items():
        if value not in choices:
            raise ConfigError(f"{option} {value}: must be one of {', '.join(choices)}{nearest(value, choices)}")


def _measure(spec: "Spec", gpus: int, path: Any) -> None:
    """One rank here; several under torchrun. Raises what is refused; ends with the exit code of ranks that failed."""
    from dataclasses import asdict

    from h3dist.bench.__main__ import work
    from h3dist.bench.spec import parse_shape
    from h3dist.bench.variants import choose
    from h3dist.topology import Ranks

    for shape in spec.shapes:
        parse_shape(shape)
    choose(spec.variants)
    spec.layout(gpus)
    if not path.parent.is_dir():
        from h3dist.errors import OutputError

        raise OutputError(f"--out {path}: {path.parent} is no folder")
    told = {"spec": asdict(spec), "out": str(path), "status_dir": None, "threads": "auto"}
    if gpus == 1:
        work(told, Ranks())
        return
    _launch(told, gpus)


def _launch(told: dict[str, Any], gpus: int) -> None:
    import json

    from h3dist.launcher import report
    from h3dist.processes import launch_ranks
    from h3dist.topology import threads_per_rank
    from h3dist.torchrun import run_folder, torchrun

    folder = run_folder()
    told |= {"status_dir": str(folder / "status")}
    (folder / "bench.json").write_text(json.dumps(told), encoding="ascii")
    outcome = launch_ranks(
        torchrun(folder, gpus, "h3dist.bench", [str(folder / "bench.json")]),
        folder / "status",
        gpus,
        [],
        environ={"OMP_NUM_THREADS": str(threads_per_rank("auto", gpus))},
        log=folder / "torchrun.log",
    )
    code = report(outcome, folder, gpus, verbose=False)
    if code:
        raise typer.Exit(code)


def _judge(folder: str, device: str, out: str | None) -> None:
    from pathlib import Path

    import torch

    from h3dist.bench.judge import judge, table, write

    cuda = device == "cuda" or (device == "auto" and torch.cuda.is_available())
    record = judge(Path(folder), torch.device("cuda" if cuda else "cpu"))
    if out:
        write(record, Path(out))
    typer.echo(table(record))


def _refresh(path: str) -> None:
    from pathlib import Path

    from h3dist.bench.refresh import refresh
    from h3dist.plan.rates import TABLE

    for row in refresh(Path(path)):
        typer.echo(f"{row['of']} {row['what']}: {row['value']:g} {row['unit']}")
    say(f"written to {TABLE}")
