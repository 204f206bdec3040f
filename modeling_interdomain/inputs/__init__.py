"""What arrives at a forward: checks, keywords and the layout of its tokens."""
