"""What tasks are trained towards: losses by name, each a file that registers itself when it is imported."""

from peft_mux.modeling.objectives import (
    classification,
    distillation,
    language,
    own_loss,
    policy,
    preference,
    token_classification,
)

__all__ = ["classification", "distillation", "language", "own_loss", "policy", "preference", "token_classification"]
