"""Strategy of the parameter server: Lightning's side of `paramserver`."""
