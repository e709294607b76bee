"""Wire: trees of tensors as bytes, framed messages, and the sockets that carry them."""
