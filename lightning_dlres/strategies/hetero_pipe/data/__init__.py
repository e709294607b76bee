"""Data of a pipeline run: rank 0 reads it and sends each batch to all ranks."""
