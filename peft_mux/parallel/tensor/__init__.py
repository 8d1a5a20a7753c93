"""Tensor parallelism: layers cut over processes, and interleaved passes that hide the all-reduces (M section 3.4.2)."""
