"""A report of some files: Markdown to print, or a folder with Markdown and pictures."""

from collections.abc import Sequence
from pathlib import Path

from h3dist.errors import OutputError
from h3dist.report.load import load
from h3dist.report.markdown import markdown


def report_text(files: Sequence[Path]) -> str:
    """The report as Markdown. Raises `RequestError` for a file that holds no measurements."""
    return markdown([load(file) for file in files])


def write_report(files: Sequence[Path], folder: Path) -> Path:
    """Write `report.md` and its pictures into `folder`, made if absent. Gives the path of the report.

    Raises `RequestError`, `OutputError`, and `MissingDependency` without matplotlib.
    """
    from h3dist.report.pictures import draw

    sources, report = [load(file) for file in files], folder / "report.md"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        report.write_text(markdown(sources, draw(sources, folder)), encoding="utf-8")
    except OSError as error:
        raise OutputError(f"cannot write {report}: {error.strerror}") from error
    return report
