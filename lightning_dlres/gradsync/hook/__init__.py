"""Communication hook of torch's DistributedDataParallel, its state, and its planning."""
