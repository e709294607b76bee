"""Ranks that take part in a measurement."""
