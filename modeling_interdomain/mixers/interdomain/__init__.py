"""Interdomain Attention."""
