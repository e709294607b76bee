"""One stage's computation: forward and backward of its layers by micro-batches."""
