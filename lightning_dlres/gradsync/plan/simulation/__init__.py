"""Simulation of gradient synchronisation: the executor's graphs in virtual time."""
