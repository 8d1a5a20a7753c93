"""What is asked of a run from outside of its loop."""
