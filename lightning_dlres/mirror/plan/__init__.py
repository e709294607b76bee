"""Plan of the mirror: table of the regions, and which layers are on the device at what time."""
