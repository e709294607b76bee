"""Where samples come from: storage nodes, folders, and any URL that fsspec knows."""
