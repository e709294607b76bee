"""Report: predicted beside measured memory, as text and a picture."""
