"""Reports on running servers."""
