"""The sparse branch beside a recurrent mixer (HAX)."""
