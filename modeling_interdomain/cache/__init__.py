"""What one layer keeps of the tokens it has read."""
