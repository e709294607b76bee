"""Plan of the mirror: table of the region, and which layers are on the device at what time."""
