"""Report: predictions of a plan beside the measurements, as a picture."""
