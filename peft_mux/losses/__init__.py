"""Losses beyond next tokens: classification, preferences, distillation, policies and users' own."""

import peft_mux.modeling.objectives  # noqa: F401  # the registry imports these modules in a fixed order
