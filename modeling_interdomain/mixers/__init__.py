"""Token mixers: what a layer does across tokens. A folder a family."""
