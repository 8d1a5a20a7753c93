"""Adapters of many tasks on one layer: how they are checked, injected, attached, run and saved.

Each kind of adapters registers itself when its file is imported here.
"""

from peft_mux.modeling.adapters.lora import kind as _lora  # noqa: F401

# LoRA first: of several kinds on one layer it lies closest to the frozen weight, with which its kernels multiply.
# isort: split
from peft_mux.modeling.adapters import catalogue as _catalogue  # noqa: F401
from peft_mux.modeling.adapters.bottleneck import kind as _bottleneck  # noqa: F401
from peft_mux.modeling.adapters.diff_pruning import kind as _diff_pruning  # noqa: F401
from peft_mux.modeling.adapters.prompts import prefix as _prefix  # noqa: F401
from peft_mux.modeling.adapters.prompts import virtual_tokens as _virtual_tokens  # noqa: F401
