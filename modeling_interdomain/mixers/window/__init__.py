"""Softmax attention to the last tokens and the first, and a state of those between."""
