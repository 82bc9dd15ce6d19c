"""Code of the pipeline actor, which runs Ray Data, and of what the training process asks it."""
