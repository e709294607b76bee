"""Report: predictions beside measurements, as tables and pictures."""
