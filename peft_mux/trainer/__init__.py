"""`MultiTaskTrainer`, and the parts that it holds."""
