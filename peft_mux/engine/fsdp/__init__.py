"""Frozen weights divided among data-parallel processes (FSDP2)."""
