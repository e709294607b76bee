"""Storage backends: folders, stores, URLs that fsspec knows, storage nodes, and registered ones."""
