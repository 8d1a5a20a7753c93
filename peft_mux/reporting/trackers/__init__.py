"""Runs in W&B, TensorBoard, MLflow, Trackio and their like: one for all tasks, or one for each."""
