"""Messages between ranks, and the watch that detects lost ranks."""
