"""Training of the models that capture is judged on, by each contender, and the comparison."""
