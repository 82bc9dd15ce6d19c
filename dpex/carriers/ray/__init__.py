"""The pipeline actor, which runs Ray Data, and the training process's interface to it."""
