"""Reuse: layers that write the gradient of their input into the input's own memory."""
