"""Kernels that convert gradients to 16-bit floating-point numbers and back."""
