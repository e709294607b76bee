"""Streams and copies of the device that trains."""
