"""Grouped bottlenecks (Adapter Tuning) on a GPU: LoRA's products, with a nonlinearity and biases between them."""
