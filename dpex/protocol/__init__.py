"""Who makes which chunk, what is lost and made again, what is delivered; no Ray and no I/O."""
