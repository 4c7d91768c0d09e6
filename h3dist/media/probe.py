"""What a media file really holds, found by decoding it."""

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from h3dist.errors import RequestError
from h3dist.media.boxes import Layout, read_layout

if TYPE_CHECKING:
    import av


@dataclass(frozen=True)
class Probe:
    """A film with, perhaps, sound. Ticks are of the movie's timescale."""

    frames: int  # decoded and counted
    width: int
    height: int
    fps: Fraction
    audio_rate: int | None
    audio_channels: int
    audio_samples: int  # what the track says; a decoder gives whole AAC frames of 1024, a few more
    timescale: int
    video_ticks: int
    audio_ticks: int
    faststart: bool
    metadata: dict[str, str]


def probe(path: str | Path) -> Probe:
    """Decode the MP4 at `path` and tell what it holds. Raises RequestError where it cannot be read."""
    import av

    try:
        layout = read_layout(path)
        with av.open(str(Path(path).resolve())) as container:
            return _probe(container, layout)
    except (OSError, ValueError, IndexError, av.FFmpegError) as error:
        raise RequestError(f"{path} cannot be read as an MP4: {error}") from error


def _probe(container: "av.container.InputContainer", layout: Layout) -> Probe:
    video = container.streams.video[0]
    audio = next(iter(container.streams.audio), None)
    return Probe(
        frames=sum(1 for _ in container.decode(video)),
        width=video.width,
        height=video.height,
        fps=video.average_rate,
        audio_rate=audio and audio.rate,
        audio_channels=audio.channels if audio else 0,
        audio_samples=round(audio.duration * audio.time_base * audio.rate) if audio else 0,
        timescale=layout.timescale,
        video_ticks=layout.ticks["vide"],
        audio_ticks=layout.ticks.get("soun", 0),
        faststart=layout.faststart,
        metadata=dict(container.metadata),
    )
