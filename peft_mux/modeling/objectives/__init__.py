"""What tasks are trained towards: losses by name, each a file that registers itself when it is imported."""

from peft_mux.modeling.objectives import classification, language, own_loss, preference

__all__ = ["classification", "language", "own_loss", "preference"]
