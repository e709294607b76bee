"""Contenders of benchmarks/hetero_pipeline.py, what their ranks run, and its matrix."""
