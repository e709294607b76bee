"""The ground floor: what every subsystem needs once (units, errors, wire format, network, trace,
tables)."""
