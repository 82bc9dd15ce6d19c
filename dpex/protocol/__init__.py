"""State machines that assign chunks, recover losses and order batches, without Ray or I/O."""
