"""Gradients of adapters, added up over replicas."""
