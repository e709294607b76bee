"""A small byte-level GPT and its data for trying features, like `lightning.pytorch.demos`."""
