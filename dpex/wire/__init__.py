"""Code for the bytes between processes: pickles, blocks, and shared memory."""
