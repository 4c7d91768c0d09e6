"""Measurements: steps, and what they are made of, on random weights of any size."""
