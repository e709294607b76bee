"""Reuse: layers that write their input's gradient over their input, and ReLUs that save signs."""
