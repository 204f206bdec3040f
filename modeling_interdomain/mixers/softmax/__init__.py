"""Softmax attention, and the dynamic masks of its keys."""
