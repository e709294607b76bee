"""Cache of one host: a process that prefetches samples into shared memory, and its clients."""
