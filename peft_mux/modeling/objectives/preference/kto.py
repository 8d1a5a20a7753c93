"""`kto`: answers that are good or bad, each for itself, with the backbone without adapters as the reference.

How far the model has moved from the reference is estimated on answers to other prompts of the same global batch: each
prompt with the answer before it, which is the second sequence of a row (`mismatched`). Those sequences are read in the
passes without gradient only.

Shape letters: M targets and R rows of a task in a micro-batch.
"""

from __future__ import annotations

import torch

from peft_mux.data.preferences.forms import KTO_ROWS, SINGLE_ROWS
from peft_mux.data.formats import RowForm
from peft_mux.modeling.objectives.language_head import LANGUAGE_HEAD
from peft_mux.modeling.objectives.objective import BaseObjective, register_objective
from peft_mux.modeling.objectives.outputs import TaskLoss, TokenOutputs
from peft_mux.modeling.objectives.preference.unpaired_losses import KTO_LOSSES, KTOArgs, kto_losses


class KTOLoss(BaseObjective):
    """The losses of `trl.KTOTrainer` on rows with an answer and a verdict.

    With `kto` it differs from TRL in batches of several processes or accumulated ones: there each micro-batch of TRL has
    an estimate and pairs of its own, here the global batch has one.
    """

    name = "kto"
    loss_types = KTO_LOSSES
    Args = KTOArgs
    head = LANGUAGE_HEAD
    row_form = SINGLE_ROWS
    has_logits = False
