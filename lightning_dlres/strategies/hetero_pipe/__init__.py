"""`Trainer(strategy="dlres_hetero_pipe")`: pipeline and data parallel training."""
