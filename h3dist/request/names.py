"""The names by which a prompt speaks of its media: <Picture i>, <Video k>, <Audio j>, each counted from 1."""

import re
from collections.abc import Mapping

from h3dist.errors import RequestError

NAME = re.compile(r"<(Picture|Video|Audio) ([0-9]{1,1000})>")
ALMOST = re.compile(r"<\s*(picture|image|photo|video|film|audio|sound)\s*#?([0-9]{1,1000})\s*>", re.IGNORECASE)
MEANT = {"image": "Picture", "photo": "Picture", "film": "Video", "sound": "Audio"}


def check_names(prompt: str, counts: Mapping[str, int], required: bool) -> list[str]:
    """What to tell about the names in `prompt`, where there are so many of "Picture", "Video" and "Audio".

    A name that is nearly one of these is told; so is, where `required`, a medium that goes unnamed. Raises
    RequestError for the name of a medium that is not there.
    """
    named = {(kind, int(number)) for kind, number in NAME.findall(prompt)}
    absent = sorted(name for name in named if not 1 <= name[1] <= counts[name[0]])
    if absent:
        there = ", ".join(f"{count} <{kind} ...>" for kind, count in counts.items())
        names = ", ".join(f"<{kind} {number}>" for kind, number in absent)
        raise RequestError(f"the prompt names {names}, which the request does not have; it has {there}")
    notes = []
    for found in ALMOST.finditer(prompt):
        if not NAME.fullmatch(found[0]):
            kind = MEANT.get(found[1].lower(), found[1].capitalize())
            notes.append(f"{found[0]} in the prompt names nothing; the name would be <{kind} {int(found[2])}>")
    if required:
        every = [(kind, number) for kind, count in counts.items() for number in range(1, count + 1)]
        unnamed = [f"<{kind} {number}>" for kind, number in every if (kind, number) not in named]
        notes += [f"the prompt does not name {', '.join(unnamed)}"] if unnamed else []
    return notes
