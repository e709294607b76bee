"""Memory of a host's cache: the cache space, the pinned tier, and writes that wait for space."""
