"""Operators: the mathematics on tensors alone. A folder a family."""
