"""Connection of a worker to one server."""
