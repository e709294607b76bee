"""Engines of a parameter server: the servers, and the workers' end of the connections."""
