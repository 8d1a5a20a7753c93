"""Right or wrong: what runs on CUDA alone, compared with float64 or with the plain path, with stated tolerances."""
