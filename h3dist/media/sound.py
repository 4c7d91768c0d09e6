"""Sound as it goes into files: cut at its tail to the length of the picture, nothing else touched."""

import io
import os
import wave
from pathlib import Path
from typing import Any

import numpy as np

from h3dist.errors import NumericsError, OutputError
from h3dist.geometry import AUDIO_RATE, SAMPLES_PER_AUDIO_LATENT, SOUND_CHANNELS, audio_samples
from h3dist.media.files import deleted_on_error, plain_errors

FULL_SCALE = 32767  # of 16-bit PCM


def cut_sound(audio: Any, frames: int) -> np.ndarray:
    """float32 [2, N] from sound [2, M] at 32 kHz, cut at its tail to the N samples that `frames` last.

    A third of all lengths come out of the VAE 266 samples (8 ms) short, because the number of audio latents
    is rounded to the nearest: there silence of that length follows the sound. Raises NumericsError for NaN or
    infinity, OutputError where a latent (800 samples) or more is missing.
    """
    sound = np.asarray(audio, dtype=np.float32)
    wanted = audio_samples(frames)
    if sound.ndim != 2 or sound.shape[0] != SOUND_CHANNELS:
        raise OutputError(f"sound must be [{SOUND_CHANNELS}, samples], this is {list(sound.shape)}")
    if not np.isfinite(sound).all():
        raise NumericsError("the audio to be written holds NaN or infinity")
    missing = wanted - sound.shape[1]
    if missing >= SAMPLES_PER_AUDIO_LATENT:
        raise OutputError(f"{frames} frames last {wanted} samples, the sound has only {sound.shape[1]}")
    return np.pad(sound[:, :wanted], ((0, 0), (0, max(missing, 0))))


def write_wav(path: str | Path, audio: Any, *, frames: int) -> None:
    """Write the sound [2, M] of a silent film: 16-bit PCM, stereo, 32 kHz, cut as `cut_sound` does.

    Written to `path` itself, which is removed where anything fails. Raises NumericsError, OutputError.
    """
    levels = np.rint(np.clip(cut_sound(audio, frames), -1, 1) * FULL_SCALE).astype("<i2")
    whole = io.BytesIO()
    with wave.open(whole, "wb") as sheet:
        sheet.setnchannels(SOUND_CHANNELS)
        sheet.setsampwidth(levels.itemsize)
        sheet.setframerate(AUDIO_RATE)
        sheet.writeframes(levels.T.tobytes())
    with deleted_on_error(path), plain_errors(path), open(path, "wb") as file:
        file.write(whole.getvalue())
        file.flush()
        os.fsync(file.fileno())
