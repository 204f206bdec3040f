"""The cache of a whole model, its files and what they belong to."""
