"""Interdomain Attention; entry.py chooses among the ways to compute it, naive.py is the definition."""
