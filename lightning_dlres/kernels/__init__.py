"""Numba kernels: each operation with a CPU and a CUDA body, chosen by the tensor's device.

Numba is imported by the first call, not with the package.
"""
