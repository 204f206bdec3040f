"""What a layer does to each token, after the mixer."""
