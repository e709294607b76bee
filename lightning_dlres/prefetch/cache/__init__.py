"""The cache of one host: a process that prefetches samples into shared memory."""
