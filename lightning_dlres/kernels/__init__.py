"""Numba kernels: each operation has a CPU and a CUDA implementation, chosen by the tensor's device.

The first call imports Numba; importing the package does not.
"""
