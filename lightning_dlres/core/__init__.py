"""Shared basics of all subsystems: units, errors, checks, wire format, sockets, traces, tables."""
