"""Grouped adapter kernels next to their contenders."""
