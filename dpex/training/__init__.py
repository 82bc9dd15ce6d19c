"""Code of the training process: which batches come next, in which order they are delivered."""
