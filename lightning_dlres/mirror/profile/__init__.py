"""Profile of a model for its mirror: sizes, the order in which layers are used, and times."""
