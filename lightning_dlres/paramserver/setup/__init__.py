"""Inputs of a run: options, the keys of a model, and its optimizer state."""
