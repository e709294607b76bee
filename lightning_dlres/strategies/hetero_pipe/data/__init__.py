"""Loaders: one rank reads the data for all ranks."""
