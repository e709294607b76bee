"""Transfer of bytes between the device and the tiers, with the GPU streams that carry them."""
