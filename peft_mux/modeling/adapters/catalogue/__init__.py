"""Every PEFT type, classified: fused, sliced, weight-space, prompt/KV, or refused with the reason and the nearest.

The kinds of sliced and weight-space types register themselves when this room is imported.
"""

from peft_mux.modeling.adapters.catalogue import kinds as _kinds  # noqa: F401
