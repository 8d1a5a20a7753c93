"""Adapters of many tasks on one layer: how they are checked, injected, attached, run and saved.

Each kind of adapters registers itself when its file is imported here.
"""

from peft_mux.modeling.adapters.lora import kind as _lora  # noqa: F401, I001
from peft_mux.modeling.adapters import catalogue as _catalogue  # noqa: F401
