"""Parameter server: servers that hold the parameters, and workers that push gradients to them."""
