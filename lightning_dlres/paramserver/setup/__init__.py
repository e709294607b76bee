"""What a run needs to begin: options, the keys of a model, its optimizer state."""
