"""Side effects of a training step, taken back on one rank and applied on all."""
