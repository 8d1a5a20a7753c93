"""Right or wrong: what runs on CUDA alone, held against float64 or against the plain path, with stated tolerances."""
