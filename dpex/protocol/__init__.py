"""Who makes which chunk, what is lost and made again, and what is delivered: without Ray and I/O."""
