"""Capture: any module as a chain of layers, by running its own code on every stage."""
