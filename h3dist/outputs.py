"""The files that a run writes: their names, their temporary names, and the checks before work.

A run never leaves half a file: each is written beside its place under a short temporary name, and renamed
once it is whole. The names are chosen before any rank starts, so that whoever ends the run can remove them.
Standard library only.
"""

import errno
import hashlib
import os
import secrets
import socket
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from h3dist.errors import OutputError
from h3dist.geometry import AUDIO_CHANNELS, SOUND_CHANNELS, VIDEO_CHANNELS, Geometry

ROLES = {  # field of Outputs: the end of its temporary name
    "path": ".mp4",
    "sidecar": ".json",
    "sound": ".wav",
    "rescue": ".safetensors",
    "latents": ".safetensors",
    "intermediates": ".safetensors",
    "trace": ".safetensors",
}
FLOAT_BYTES = 4
PIXELS_A_BYTE = 16  # of H.264 at the quality we write, on the safe side: an estimate for the free disk alone


@dataclass(frozen=True)
class Outputs:
    """Absolute paths of all files that a run may write, and in `parts` of their temporary forms by field.

    `sidecar` is the JSON beside the MP4 `path`, `sound` the WAV beside a silent one, `rescue` the latents
    that are left if decode or mux fails. None: not asked for, or not needed.
    """

    path: str
    sidecar: str
    sound: str | None
    rescue: str | None
    latents: str | None
    intermediates: str | None
    trace: str | None
    clobber: bool
    parts: Mapping[str, str]

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON values; `Outputs(**values)` gives it back."""
        return asdict(self)

    def targets(self) -> dict[str, str]:
        """Final paths by field name, those that are asked for."""
        return {role: getattr(self, role) for role in ROLES if getattr(self, role) is not None}

    @contextmanager
    def writing(self, role: str) -> Iterator[str]:
        """The temporary path of a field, to be written inside. What fails there names the final path.

        Raises `OutputError`.
        """
        try:
            yield self.parts[role]
        except OutputError as error:
            raise OutputError(str(error).replace(self.parts[role], getattr(self, role))) from error

    def publish(self, role: str) -> None:
        """Rename the temporary file of a field to its final name. Raises `OutputError`."""
        target = getattr(self, role)
        if not self.clobber:
            _refuse_existing(target)
        try:
            os.replace(self.parts[role], target)
        except OSError as error:
            raise OutputError(f"cannot write {target}: {error.strerror}") from error

    def discard(self) -> None:
        """Remove every temporary file that is still there."""
        remove(self.parts.values())


def remove(paths: Any) -> None:
    """Remove the files among `paths` that exist; what cannot be removed is left."""
    for path in paths:
        try:
            os.unlink(path)
        except OSError:
            continue


def choose_outputs(
    path: str,
    *,
    latents: str | None = None,
    intermediates: str | None = None,
    trace: str | None = None,
    clobber: bool = True,
    mux_audio: bool = True,
    rescue: bool = True,
) -> Outputs:
    """Name every file of a run from what the user named, relative to the working directory.

    Without `rescue` no latents are kept if decode or mux fails, since they are in a file already. Raises
    `OutputError` where a folder is missing or one file was named twice. Touches no file.
    """
    path = _absolute(path)
    extra = {"latents": latents, "intermediates": intermediates, "trace": trace}
    named = {role: _absolute(value) for role, value in extra.items() if value is not None}
    files = {"path": path, "sidecar": beside(path, ".json"), **named}
    files |= {} if mux_audio else {"sound": beside(path, ".wav")}
    files |= {"rescue": beside(path, ".latents.safetensors")} if rescue else {}
    twice = [file for file, count in Counter(files.values()).items() if count > 1]
    if twice:
        raise OutputError(f"{twice[0]} is named for two outputs; each needs a file of its own")
    token = secrets.token_hex(6)
    parts = {
        role: os.path.join(os.path.dirname(file), f".h3dist-{token}-{role}{ROLES[role]}")
        for role, file in files.items()
    }
    return Outputs(**{role: files.get(role) for role in ROLES}, clobber=clobber, parts=parts)


def beside(path: str, ending: str) -> str:
    """The companion NAME + `ending` of NAME.mp4, in the same folder.

    Where the file system's limit, which is in bytes, leaves no room, NAME is cut at a character and marked
    with eight hexadecimal digits of its SHA-256, so that two long names stay two.
    """
    folder, name = os.path.split(path)
    stem = name[:-4] if name.lower().endswith(".mp4") and len(name) > 4 else name
    room = _name_limit(folder) - len(ending)
    if len(os.fsencode(stem)) > room:
        mark = "~" + hashlib.sha256(os.fsencode(stem)).hexdigest()[:8]
        while len(os.fsencode(stem)) > room - len(mark):
            stem = stem[:-1]
        stem += mark
    return os.path.join(folder, stem + ending)


def check_outputs(outputs: Outputs, geometry: Geometry, steps: int) -> None:
    """Find out before any work whether the files can be written; leaves nothing behind.

    Raises `OutputError`: a name too long, a target that is no plain file or must not be replaced, a folder
    where nothing can be created, a disk without room for what `geometry` and `steps` evaluations will make.
    """
    for target in outputs.targets().values():
        _check_target(target)
    if not outputs.clobber:
        for target in outputs.targets().values():
            _refuse_existing(target)
    for role, part in outputs.parts.items():
        _check_writable(part, getattr(outputs, role))
    _check_room(outputs, geometry, steps)


def refuse_inputs(outputs: Outputs, inputs: Iterable[str | None]) -> None:
    """Raise `OutputError` where a run would replace a file that it reads: one of `inputs`, or in a folder of them."""
    read = {os.path.realpath(path) for path in inputs if path}
    folders = {path for path in read if os.path.isdir(path)}
    for role, target in outputs.targets().items():
        real = os.path.realpath(target)
        if real in read or (os.path.dirname(real) in folders and os.path.lexists(real)):
            what = "" if role == "path" else f", as the {role} of {outputs.path},"
            raise OutputError(f"this run reads {target} and would replace it{what} with its own; name another output")


@contextmanager
def claimed(targets: Iterable[str]) -> Iterator[None]:
    """While it lasts, no other run on this machine claims one of these files. Raises `OutputError` where one has.

    Each is held as a name in the kernel's abstract sockets, which goes with the process, however that ends.
    """
    with ExitStack() as held:
        for target in targets:
            folder, name = os.path.split(os.path.abspath(target))
            path = os.fsencode(os.path.join(os.path.realpath(folder), name))
            holder = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            try:
                holder.bind(b"\0h3dist-" + hashlib.sha256(path).hexdigest().encode())
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                raise OutputError(f"another run is writing {target} now; name another output, or wait") from error
        yield


def bytes_needed(geometry: Geometry, steps: int) -> dict[str, int]:
    """About how many bytes each file of a run takes, by field name of `Outputs`."""
    video = VIDEO_CHANNELS * geometry.latent_t * geometry.latent_h * geometry.latent_w
    latents = FLOAT_BYTES * (video + AUDIO_CHANNELS * SOUND_CHANNELS * geometry.audio_latents)
    pixels = geometry.width * geometry.height * geometry.frames
    sound = FLOAT_BYTES * SOUND_CHANNELS * geometry.audio_samples
    return {
        "path": pixels // PIXELS_A_BYTE + sound,
        "sidecar": 1 << 16,
        "sound": sound,
        "rescue": latents,
        "latents": latents,
        "intermediates": latents + 3 * pixels + sound,
        "trace": latents * (steps + 1),
    }


def _absolute(path: str) -> str:
    """`path` from the root; its folder must exist."""
    if not path or "\0" in path:
        raise OutputError(f"output path {path!r} is no file name")
    whole = os.path.abspath(path)
    folder = os.path.dirname(whole)
    if not os.path.isdir(folder):
        raise OutputError(f"cannot write {path}: there is no folder {folder}")
    if path.endswith("/"):
        raise OutputError(f"cannot write {path}: it names a folder; add a file name, as in {path}out.mp4")
    return whole


def _name_limit(folder: str) -> int:
    """The longest file name that a folder takes, in bytes."""
    try:
        return os.pathconf(folder, "PC_NAME_MAX")
    except (OSError, ValueError):
        return 255


def _check_target(path: str) -> None:
    size, limit = len(os.fsencode(os.path.basename(path))), _name_limit(os.path.dirname(path))
    if size > limit:
        raise OutputError(f"cannot write {path}: the name takes {size} bytes, the file system at most {limit}")
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        raise OutputError(f"cannot write {path}: it is {'a folder' if stat.S_ISDIR(mode) else 'no plain file'}")


def _refuse_existing(path: str) -> None:
    if os.path.lexists(path):
        raise OutputError(f"{path} exists, and --no-clobber keeps it")


def _check_writable(part: str, target: str) -> None:
    """Create and remove the temporary file: proves folder, permission and file system in one."""
    try:
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        os.unlink(part)
    except OSError as error:
        raise OutputError(f"cannot write {target}: {error.strerror}") from error


def _check_room(outputs: Outputs, geometry: Geometry, steps: int) -> None:
    """Compare what will be written with what is free, disk by disk."""
    sizes, needed, folders = bytes_needed(geometry, steps), Counter[int](), dict[int, str]()
    for role, target in outputs.targets().items():
        folder = os.path.dirname(target)
        device = os.stat(folder).st_dev
        needed[device] += sizes[role]
        folders[device] = folder
    for device, folder in folders.items():
        disk = os.statvfs(folder)
        free = disk.f_bavail * disk.f_frsize
        if free < needed[device]:
            raise OutputError(
                f"{folder} has {free / 1e6:.0f} MB free; this run writes about {needed[device] / 1e6:.0f} MB"
            )
