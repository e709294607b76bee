"""One training step of the user's LightningModule, cut at the pipelined module."""
