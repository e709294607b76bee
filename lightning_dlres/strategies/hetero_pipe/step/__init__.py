"""One training step of the user's LightningModule, cut at the call of the pipelined module."""
