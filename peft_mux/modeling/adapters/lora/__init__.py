"""LoRA: its configuration, its layer, and its fused pass over all tasks."""
