"""Every number of MiniMax H3's picture and sound geometry, as pure functions.

Units are in the names: frames are pictures at 24 a second, latents are what the VAEs give, rows are what the
transformer sees, samples are sound at 32 kHz. Standard library only.
"""

from dataclasses import dataclass

FPS = 24
CHUNK_FRAMES = 17  # frames that the video VAE makes of every 5 latents after the first two
TAIL_FRAMES = 5  # frames of the first two latents: a clip is 17k + 5 frames long
CHUNK_LATENTS = 5
TAIL_LATENTS = 2
MAX_TRAINED_FRAMES = 362
CANVAS_MULTIPLE = 32  # pixels: one patch of 2 x 2 latents
LATENT_PIXELS = 16
PATCH = 2
VIDEO_CHANNELS = 24
AUDIO_CHANNELS = 32
SOUND_CHANNELS = 2  # stereo: the audio VAE sees each channel alone
AUDIO_RATE = 32000
AUDIO_LATENT_RATE = 40
SAMPLES_PER_AUDIO_LATENT = AUDIO_RATE // AUDIO_LATENT_RATE


def align_frames(frames: int) -> int:
    """The smallest legal clip length (17k + 5, at least 5) that is not shorter than `frames`."""
    frames = max(TAIL_FRAMES, frames)
    return frames + (TAIL_FRAMES - frames) % CHUNK_FRAMES


def frames_for_duration(seconds: float) -> int:
    """Frames in `seconds` of video, at least one, rounded to the nearest and not yet aligned."""
    return max(1, round(FPS * seconds))


def legal_frames() -> tuple[int, ...]:
    """The 22 clip lengths that the model was trained for, 5 to 362 frames."""
    return tuple(range(TAIL_FRAMES, MAX_TRAINED_FRAMES + 1, CHUNK_FRAMES))


def latent_frames(frames: int) -> int:
    """Video latents along time for a legal clip length: 2, 7, 12, ... for 5, 22, 39, ... frames."""
    assert frames == align_frames(frames), frames
    return CHUNK_LATENTS * (frames - TAIL_FRAMES) // CHUNK_FRAMES + TAIL_LATENTS


def audio_latents(frames: int) -> int:
    """Audio latents of one channel for a clip of `frames`, rounded to the nearest; no ties occur."""
    return round(frames * AUDIO_LATENT_RATE / FPS)


def audio_samples(frames: int) -> int:
    """Sound samples of one channel that last as long as `frames`, rounded down."""
    return frames * AUDIO_RATE // FPS


def nearest_multiples(value: int) -> tuple[int, int]:
    """The legal canvas sides just below and just above `value` pixels; both 32 where none is below."""
    low = max(CANVAS_MULTIPLE, value // CANVAS_MULTIPLE * CANVAS_MULTIPLE)
    high = max(CANVAS_MULTIPLE, -(-value // CANVAS_MULTIPLE) * CANVAS_MULTIPLE)
    return low, high


@dataclass(frozen=True)
class Geometry:
    """One clip: `width` x `height` pixels (multiples of 32) and `frames` (17k + 5)."""

    width: int
    height: int
    frames: int

    def __post_init__(self) -> None:
        assert self.width >= CANVAS_MULTIPLE and self.width % CANVAS_MULTIPLE == 0, self.width
        assert self.height >= CANVAS_MULTIPLE and self.height % CANVAS_MULTIPLE == 0, self.height
        assert self.frames == align_frames(self.frames), self.frames

    @property
    def latent_t(self) -> int:
        """Video latents along time."""
        return latent_frames(self.frames)

    @property
    def latent_h(self) -> int:
        """Video latents down the picture."""
        return self.height // LATENT_PIXELS

    @property
    def latent_w(self) -> int:
        """Video latents across the picture."""
        return self.width // LATENT_PIXELS

    @property
    def audio_latents(self) -> int:
        """Audio latents of one channel."""
        return audio_latents(self.frames)

    @property
    def video_rows(self) -> int:
        """Transformer rows of the video: one for each 2 x 2 patch of every latent frame."""
        return self.latent_t * (self.latent_h // PATCH) * (self.latent_w // PATCH)

    @property
    def audio_rows(self) -> int:
        """Transformer rows of the sound: all latents of channel 0, then of channel 1."""
        return SOUND_CHANNELS * self.audio_latents

    @property
    def audio_samples(self) -> int:
        """Sound samples of one channel that last as long as the video."""
        return audio_samples(self.frames)

    @property
    def seconds(self) -> float:
        """Length of the video."""
        return self.frames / FPS
