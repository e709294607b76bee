"""Resources of one host: files, memory, locks and processes."""
