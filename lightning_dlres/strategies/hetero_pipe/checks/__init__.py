"""Checks that a step gives the same result when it runs in micro-batches."""
