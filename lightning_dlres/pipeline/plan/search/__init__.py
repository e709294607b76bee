"""Searches for the best split of layers and the best order of devices."""
