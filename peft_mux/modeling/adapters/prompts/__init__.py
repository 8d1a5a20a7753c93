"""Prompt learning: PEFT types without adapted layers, whose virtual tokens or keys precede each sequence."""
