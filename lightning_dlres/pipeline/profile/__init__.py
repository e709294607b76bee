"""Profile: times, sizes and links, measured on the devices at hand."""
