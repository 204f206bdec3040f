"""Checkpoints from elsewhere: Llama-style models, training runs, and a check of what came out."""
