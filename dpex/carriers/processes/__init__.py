"""Worker processes of this machine, which the training process starts as torch starts its own."""
