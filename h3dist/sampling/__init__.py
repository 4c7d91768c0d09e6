"""From noise to latents: schedules (no torch), the initial noise, and the samplers.

Import the module you need; importing this package loads none of them.
"""
