"""Execute: the engine that follows a plan on one rank."""
