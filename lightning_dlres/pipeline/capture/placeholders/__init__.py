"""Tensors without data, which stand for those of other stages."""
