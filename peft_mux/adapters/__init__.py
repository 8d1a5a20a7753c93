"""Adapter types other than LoRA: bottleneck, DiffPruning, prompts, and all that PEFT runs one task at a time."""

import peft_mux.modeling.adapters  # noqa: F401  # the registry imports these modules in a fixed order
