"""Wire format and transport: trees of tensors as bytes, framed messages, sockets and keys."""
