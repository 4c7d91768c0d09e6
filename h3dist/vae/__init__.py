"""The two VAEs: video latents to frames, audio latents to a waveform."""

from h3dist.vae.audio import AudioVae
from h3dist.vae.video import VideoVae

__all__ = ["AudioVae", "VideoVae"]
