"""The losses of tasks by name, each a file that registers itself when it is imported."""

from peft_mux.losses import classification, distill, policy, preference, user_loss
from peft_mux.modeling.objectives import language

__all__ = ["classification", "distill", "language", "policy", "preference", "user_loss"]
