"""Measurement of codecs, links and torch's all-reduce, from which plans are made."""
