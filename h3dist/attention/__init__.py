"""Attention backends: one small file each, found by name through the registry."""
