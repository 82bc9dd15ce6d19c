"""Code of the training process: which batches to request, and the order of their delivery."""
