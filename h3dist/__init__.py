"""MiniMax H3 audio-video generation on 1 to 8 GPUs, straight from single-file checkpoints."""

__version__ = "0.1.0"
