"""Deferred construction: a model is built without memory, and each rank makes its own part."""
