"""Plans of a parameter server: its keys, and their places on the servers."""
