"""State space duality, of which Mamba-2 is a case."""
