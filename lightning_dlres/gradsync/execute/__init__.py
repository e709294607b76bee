"""Engine of gradient synchronisation: it runs the tasks of a plan."""
