"""Profile: measurement of one training step, and the result that plans are made from."""
