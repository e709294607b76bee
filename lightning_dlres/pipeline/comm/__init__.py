"""Messages between ranks, and the watch that notices a lost rank."""
