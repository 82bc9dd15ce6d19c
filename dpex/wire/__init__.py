"""Data transport between processes: pickles, blocks and shared memory."""
