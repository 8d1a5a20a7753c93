"""Losses of a student on what a teacher gave."""

from peft_mux.modeling.objectives.distillation import distill

__all__ = ["distill"]
