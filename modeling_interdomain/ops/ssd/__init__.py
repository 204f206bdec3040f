"""State space duality; naive.py is the definition."""
