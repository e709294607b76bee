"""Tracing of the code of modules and steps, to find their layers."""
