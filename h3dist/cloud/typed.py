"""The options of `runpod/pod.py`, each written once."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from h3dist.cloud.money import Limits
from h3dist.cloud.quote import Ask
from h3dist.cloud.recipe import Recipe, load_recipe

RTX_PRO = "NVIDIA RTX PRO 6000 Blackwell Server Edition"

Name = Annotated[str | None, typer.Argument(help="A pod's name; not needed while there is only one.")]
PodName = Annotated[str | None, typer.Option("--pod", help="A pod's name; not needed while there is only one.")]
Rest = Annotated[list[str] | None, typer.Argument(help="After --.")]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of a table.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask; also ends what a killed client left.")]
Out = Annotated[Path | None, typer.Option("--out", help="Folder for results; a new one by default.")]
Send = Annotated[list[Path] | None, typer.Option("--send", help="Local file to send along, as ../inputs/NAME.")]
Bare = Annotated[bool, typer.Option("--no-checkpoints", help="The run needs no checkpoint files.")]
Pods = Annotated[int, typer.Option("--pods", min=1, help="Pods one after another, when one is taken back.")]
Resume = Annotated[bool, typer.Option("--resume", help="Send the JSON files in --out along first.")]


@dataclass(frozen=True)
class Wanted:
    """A pod as typed: which one, how it is set up, what it may cost."""

    ask: Ask
    recipe: Recipe
    limits: Limits


def wanted(
    gpu: Annotated[
        list[str] | None, typer.Option(help=f"GPU type ({RTX_PRO}), or a unique part; again for the next best.")
    ] = None,
    gpus: Annotated[int, typer.Option(help="How many GPUs.")] = 1,
    fewer: Annotated[bool, typer.Option("--fewer", help="Take 6, 4, 2 or 1 when that many cannot be had.")] = False,
    cloud: Annotated[
        list[str] | None, typer.Option(help="SECURE (the default) or COMMUNITY; again for the next.")
    ] = None,
    data_center: Annotated[list[str] | None, typer.Option(help="Data centre; again for the next best.")] = None,
    volume: Annotated[str | None, typer.Option(help="Network volume's id; it pins the data centre.")] = None,
    volume_gb: Annotated[int, typer.Option(help="GB of a volume that lives as long as the pod.")] = 100,
    disk: Annotated[int, typer.Option(help="GB of the container's own disk.")] = 80,
    interruptible: Annotated[
        bool, typer.Option("--interruptible", help="A cheaper pod that may be taken back at any time.")
    ] = False,
    wait_capacity: Annotated[float, typer.Option(help="Minutes to go on trying for capacity.")] = 0.0,
    min_cuda: Annotated[str, typer.Option(help="Least CUDA version of the machine's driver.")] = "13.0",
    budget: Annotated[float, typer.Option(help="Dollars at most; the pod is ended before.")] = 10.0,
    deadline: Annotated[float, typer.Option(help="Minutes at most; the pod is ended before.")] = 120.0,
    image: Annotated[str | None, typer.Option(help="Container image; one of RunPod's own by default.")] = None,
    package: Annotated[
        str | None, typer.Option(help="checkout (default), image (h3dist is in it), or h3dist==VERSION.")
    ] = None,
    recipe: Annotated[Path | None, typer.Option(help="JSON file for an image of your own.")] = None,
    hf_secret: Annotated[str | None, typer.Option(help="Name of the RunPod secret with an HF token.")] = None,
) -> Wanted:
    """The options that say which pod is wanted. Raises ConfigError."""
    ask = Ask(
        gpus=tuple(gpu or [RTX_PRO]),
        count=gpus,
        fewer=fewer,
        clouds=tuple(cloud or ["SECURE"]),
        data_centers=tuple(data_center or ()),
        volume=volume,
        disk_gb=disk,
        volume_gb=volume_gb,
        interruptible=interruptible,
        patience=wait_capacity * 60,
        min_cuda=min_cuda,
        hf_secret=hf_secret,
    )
    return Wanted(ask, load_recipe(recipe, image=image, package=package), Limits(budget, deadline * 60))


def takes_wanted(command: Callable[..., None]) -> Callable[..., None]:
    """A command that has the options of `wanted` too, and gets what they make as its argument `pod`."""
    own, shared = inspect.signature(command).parameters, inspect.signature(wanted).parameters

    @functools.wraps(command)
    def run(**given: Any) -> None:
        command(pod=wanted(**{name: given.pop(name) for name in shared}), **given)

    parameters = [p for name, p in own.items() if name != "pod"] + list(shared.values())
    keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    hints = get_type_hints(command, include_extras=True) | get_type_hints(wanted, include_extras=True)
    run.__signature__ = inspect.Signature(keyword)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: hints[p.name] for p in keyword}
    return run
