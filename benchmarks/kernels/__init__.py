"""Grouped adapter kernels beside their contenders."""
