"""Device memory (Method A): what autograd saves for backward, and where it stays meanwhile."""
