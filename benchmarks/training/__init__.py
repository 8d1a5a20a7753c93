"""Whole training steps beside plain PEFT, and what they are made of."""
