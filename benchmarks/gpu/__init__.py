"""Everything that CUDA takes, checked and timed in one call."""
