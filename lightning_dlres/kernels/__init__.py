"""Numba kernels: each operation has a CPU and a CUDA implementation, chosen by the tensor's device.

Importing this folder compiles nothing. The first call of a kernel compiles it, or loads it from
Numba's cache.
"""
