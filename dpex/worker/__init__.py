"""Code of the worker processes: indices into samples, samples into batches."""
