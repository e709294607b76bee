"""Plan: the action for every saved storage, as a pure function of the step's profile."""
