"""What was typed after `h3dist generate` and `plan`, merged and checked.

No text that is typed as an option or argument becomes an override: prompt and paths travel in the job, and
only names that were checked become `group=NAME`.
"""

import re
from dataclasses import asdict, dataclass, fields
from typing import Any

from h3dist.cli.shell import say
from h3dist.config import Config, SamplerConfig, compose, group_choices
from h3dist.errors import ConfigError, nearest
from h3dist.request import gather_request, parse_request, read_settings

SHAPING = {  # configuration that changes the clip, beside the files
    "sampler": [item.name for item in fields(SamplerConfig)],
    "attention": ["name"],
    "runtime": ["dtype", "gemm"],
    "exchange": ["codec"],
}
BYTES = {"GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6}


@dataclass(frozen=True)
class Asked:
    """The configuration, the overrides behind it, and the validated fields of the request."""

    config: Config
    overrides: list[str]
    request: dict[str, Any]


def ask(
    words: list[str],
    options: list[str],
    request_file: str | None,
    prompt_file: str | None,
    stand_in: str | None = None,
) -> Asked:
    """Merge and validate what was typed. `stand_in` is the prompt where none was."""
    from_file = request_file is not None or prompt_file is not None
    prompt, words = (None, words) if from_file or not words else (words[0], words[1:])
    if prompt is not None and re.match(r"[\w./@]+=\S", prompt):
        say(f"the first word is the prompt, though it looks like an override: {prompt!r}")
    overrides = options + words
    config = compose(overrides)
    if config.job is not None:
        raise ConfigError(f"job={config.job}: the launcher writes the job file; name a request file with --request")
    said = gather_request(vars(config.request), request_file, prompt_file, prompt)
    if stand_in is not None and "prompt" not in said:
        say(f"no prompt given; planned for one of usual length: {stand_in!r}")
        said["prompt"] = stand_in
    parse_request(said)
    told = request_file if request_file is not None else config.request.file
    if told is not None:
        _tell_differences(told, asdict(config), read_settings(told))
    return Asked(config, overrides, said)


def _tell_differences(path: str, here: dict[str, Any], there: dict[str, Any]) -> None:
    """Say where a sidecar's run was configured otherwise, in what changes a clip: its request alone is repeated."""
    found = []
    for section, names in SHAPING.items():
        was = there.get(section)
        for name in names if isinstance(was, dict) else ():
            if name in was and was[name] != here[section][name]:
                found.append(f"{section}.{name}={was[name]} (here {here[section][name]})")
    if found:
        say(f"{path} repeats its run's request, not its configuration, which had {', '.join(found)}")


def group_options(mode: str | None, attention: str | None, allow_untrained: bool) -> list[str]:
    """Options that choose a configuration group, as overrides; their names are checked first."""
    chosen = []
    for option, group, name in (("--mode", "parallel", mode), ("--attention", "attention", attention)):
        choices = group_choices(group)
        if name is not None and name not in choices:
            raise ConfigError(f"{option} {name}: must be one of {', '.join(choices)}{nearest(name, choices)}")
        chosen += [f"{group}={name}"] if name is not None else []
    return chosen + (["runtime.allow_untrained=true"] if allow_untrained else [])


def output_options(overrides: list[str], path: str | None, no_clobber: bool) -> dict[str, Any]:
    """What the options say of the output; None leaves it to the configuration."""
    if path is not None and any(override.startswith("output.path=") for override in overrides):
        raise ConfigError("-o and output.path= both name the output; give one of them")
    if path is not None and path.startswith("="):
        raise ConfigError(f"-o{path}: a short option takes no '='; write -o {path[1:]}, or -o ./{path} for such a name")
    return {"path": path, "clobber": False if no_clobber else None}


def rank_count(gpus: str) -> int | None:
    """--gpus as a number, None for auto."""
    if gpus == "auto":
        return None
    if not (gpus.isdecimal() and int(gpus) > 0):
        raise ConfigError(f"--gpus {gpus}: must be auto or a whole number above 0")
    return int(gpus)


def byte_count(size: str | None) -> int | None:
    """A size such as 96GiB in bytes."""
    if size is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(GiB|GB|MiB|MB)", size)
    if found is None or float(found[1]) == 0:
        raise ConfigError(f"--gpu-memory {size}: must be a size above 0 with its unit, as in 96GiB or 80GB")
    return int(float(found[1]) * BYTES[found[2]])
