"""Rented machines: rent one, run on it, fetch the results, always give it back. Works without torch."""
