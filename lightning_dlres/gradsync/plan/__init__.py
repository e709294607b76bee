"""Plans of gradient synchronisation: units, task graphs, and the order of transmissions."""
