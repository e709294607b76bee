"""Measured comparisons with the closest peers: one file each, run by ``make bench NAME=...``."""
