"""Predicted times and memory of a plan."""
