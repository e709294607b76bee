"""Checks that a training step gives the same result when it runs per micro-batch."""
