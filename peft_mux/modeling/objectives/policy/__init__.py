"""Losses of policies on given rollouts."""

from peft_mux.modeling.objectives.policy import policy

__all__ = ["policy"]
