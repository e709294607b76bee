"""Plan: pure functions from a profile to the fastest plan that fits into memory."""
