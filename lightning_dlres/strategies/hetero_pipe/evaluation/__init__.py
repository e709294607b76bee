"""Steps and calls outside of training: over the stages, or on the whole model."""
