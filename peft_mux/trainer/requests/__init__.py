"""What other processes ask of a run."""
