"""The server: keeps parameters and optimizer states, and answers pushes and pulls."""
