"""Folders of checkpoints, and the code that travels with them."""
