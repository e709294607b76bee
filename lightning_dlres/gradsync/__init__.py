"""Gradient synchronisation that knows of compression: gradients are encoded, sent, merged and
decoded as separate tasks."""
