"""What leaves a forward: the outputs of the models, and what layers add to the loss of training."""
