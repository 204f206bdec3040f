"""A sequence, or the heads of a layer, over several processes."""
