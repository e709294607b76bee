"""Memory: offloading, compression, reuse and recomputation of the tensors that autograd saves."""
