"""Benchmarks of peft_mux; run them from the repository root as README.md says."""
