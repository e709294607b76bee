"""The computation of one stage: forward and backward of its layers, micro-batch by micro-batch."""
