"""`Trainer(strategy="dlres_compressed_ddp")`: data parallel training with compressed gradients."""
