"""How LoRA's factors lie in a slab: as the grouped kernels read them.

A of the layers that read the same activations lie side by side, so that they are one matrix without a copy; B lies
transposed (`[R, K]`), as it is used::

    page   | q.A | k.A | v.A | o.A | q.B^T | k.B^T | v.B^T | o.B^T | gate.A | ...

Kernels read the columns of S in groups of eight ranks. So A takes whole groups of eight rows.
"""

from __future__ import annotations

from torch import nn

from peft_mux.modeling.slabs import Slot, round_up_to_group


def lora_slot(name: str, parameter: nn.Parameter) -> Slot:
    """Return how a parameter of a LoRA task lies; see `peft_mux.modeling.slabs.SlabLayout`.

    Args:
        name: PEFT's own, without the adapter id.
        parameter: A or B of a layer, or a parameter of a classification head, which lies as it is.
    """
    is_matrix = parameter.dim() == 2
    is_a, is_b = (f".{factor}." in f".{name}" for factor in ("lora_A", "lora_B"))
    # Whole groups of rows, so that the next layer's A follows at a multiple of eight ranks.
    rows_of_a = round_up_to_group(len(parameter)) * parameter.shape[1] if is_a and is_matrix else None
    return Slot(
        block=name.split(".lora_")[0].rpartition(".")[0],
        order=int(".lora_B." in name),
        num_elements=round_up_to_group(parameter.numel()) if rows_of_a is None else rows_of_a,
        is_transposed=is_b and is_matrix,
    )
