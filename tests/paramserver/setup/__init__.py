"""Tests of what a run needs to begin."""
