"""Adapters of many tasks on one layer: how they are checked, injected, attached, run and saved.

Each kind of adapters registers itself when its module is imported here.
"""

from peft_mux.modeling.adapters.lora.lora_kind import LORA

# LoRA first: of several kinds on one layer it lies closest to the frozen weight, with which its kernels multiply. The
# others follow in a fixed order.
# isort: split
from peft_mux.adapters import special_kinds as _special_kinds  # noqa: F401

# isort: split
from peft_mux.adapters import bottleneck as _bottleneck  # noqa: F401
from peft_mux.adapters import diff_pruning as _diff_pruning  # noqa: F401
from peft_mux.adapters import prompt_kind as _prompt_kinds  # noqa: F401
from peft_mux.adapters.sliced import SlicedAdapter

# Embeddings with LoRA have no kernels of their own.
LORA.forward_type = SlicedAdapter
