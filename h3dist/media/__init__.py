"""Pictures and sound into files, and what is in such files."""

from h3dist.media.mp4 import write_mp4
from h3dist.media.probe import Probe, probe
from h3dist.media.sound import cut_sound, write_wav

__all__ = ["Probe", "cut_sound", "probe", "write_mp4", "write_wav"]
