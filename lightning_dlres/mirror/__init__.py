"""Mirror in host memory: parameters, gradients and optimizer history; layers stream to a device."""
