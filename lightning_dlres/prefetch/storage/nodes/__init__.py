"""Storage nodes: servers that send many samples in one reply, and the storage that uses them."""
