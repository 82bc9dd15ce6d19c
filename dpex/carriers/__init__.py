"""What moves chunks to worker processes, and their batches back."""
