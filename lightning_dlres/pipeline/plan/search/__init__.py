"""Search for the fastest split of the layers and order of the devices."""
