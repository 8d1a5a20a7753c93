"""Losses of preferences: which of two answers is the better one, or whether one answer is good."""

from peft_mux.modeling.objectives.preference import dpo, kto, orpo, reward

__all__ = ["dpo", "kto", "orpo", "reward"]
