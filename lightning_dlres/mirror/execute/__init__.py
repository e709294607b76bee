"""Engine of the mirror: follows the plan."""
