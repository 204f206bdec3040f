"""Inner-function attention (Wonderful Matrices)."""
