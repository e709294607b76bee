"""Storage nodes: servers that send many samples in one reply, and their client."""
