"""Execute: the engine that moves saved tensors as a policy decides."""
