"""Tensor parallelism: layers cut over processes, and passes in turns that hide their sums (M section 3.4.2)."""
