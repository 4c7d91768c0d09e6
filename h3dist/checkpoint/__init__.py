"""Comfy-format checkpoints in: what a file is, what it must hold, and only those bytes that a rank keeps.

`file` reads safetensors, `storage` knows how each format lies in a file, `formats` and `nvfp4` are the
weights in memory, `comfy` opens the four model files, `shard` takes a rank's slices, `inspect` describes,
`tiny` makes small sets.
"""
