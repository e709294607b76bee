"""Cost model: predicted seconds and bytes of a plan."""
