"""What is left of a run beside its adapters and states."""
