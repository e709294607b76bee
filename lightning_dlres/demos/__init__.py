"""A small byte-level GPT and its data, to try features with; as `lightning.pytorch.demos`."""
