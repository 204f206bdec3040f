"""Reading thousands of one-neuron experts."""
