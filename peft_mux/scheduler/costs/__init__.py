"""What work takes, in seconds and bytes."""
