"""Profile: layer times, sizes, devices and links, measured on the devices at hand."""
