"""State of a worker: its exchange with servers, the pushes that it keeps, and its parameters."""
