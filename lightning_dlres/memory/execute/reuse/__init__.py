"""Layers that write the gradient of their input into their input's own memory (Method A, A6)."""
