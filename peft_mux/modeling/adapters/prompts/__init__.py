"""Learnt prompts: PEFT types without layers of their own, whose virtual tokens, or keys, stand before each sequence."""
