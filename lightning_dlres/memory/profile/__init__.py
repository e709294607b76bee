"""Profile: what a training step saves for backward, and when it uses it."""
