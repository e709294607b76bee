"""Data of a pipeline run: one rank reads it and sends each batch to all ranks."""
