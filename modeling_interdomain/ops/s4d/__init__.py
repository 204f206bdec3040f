"""The S4D layer's recurrence and readout."""
