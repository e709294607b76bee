"""Execute: the engine that moves, compresses and recomputes saved tensors."""
