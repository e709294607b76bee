"""Reports of predictions beside measurements, as tables and pictures."""
