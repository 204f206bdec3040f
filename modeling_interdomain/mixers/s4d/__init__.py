"""S4D: the same state, read by a learned vector."""
