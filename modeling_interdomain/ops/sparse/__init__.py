"""Softmax attention to a bounded number of keys a query."""
