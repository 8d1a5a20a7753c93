"""Whole training steps compared with plain PEFT, and what they are made of."""
