"""Order of an epoch: a shuffle known in advance, and each rank's shard of it."""
