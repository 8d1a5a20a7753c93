"""Contender `trl`: TRL's `SFTTrainer` with the rows of a step packed into one stream, one task after the other.

`packing=True` computes the same way, but puts rows into packs whatever step they are of, so that its steps have other
rows and losses; `padding_free=True` is its path with each step's own rows as the pack, and losses can be compared. On a
CPU its attention is torch's over the whole stream, behind a mask that keeps rows apart: exact, and quadratic in the
tokens of a step. All other settings are TRL's defaults, but that nothing is recomputed and precision is fp32, as for
the other contenders.
"""

from __future__ import annotations

from typing import Any

import torch
from peft import get_peft_model

from benchmarks.training.baselines import ModelFactory
from benchmarks.training.baselines.hf_trainer import RecordsLosses, train_in_turn
from benchmarks.training.timing import Run
from benchmarks.training.workloads import TaskWorkload, Workload


def run_trl_packing(model_factory: ModelFactory, workload: Workload, record_losses: bool = False) -> Run:
    """Train every task alone, one after the other.

    Args:
        model_factory: returns a fresh backbone.
        workload: the tasks and their rows.
        record_losses: whether to keep the loss of each step.
    """

    def make(task: TaskWorkload, folder: str) -> Any:
        torch.manual_seed(task.seed)
        exact = {"padding_free": True, "gradient_checkpointing": False, "bf16": False, "use_cpu": True}
        return sft_trainer(task, workload, model_factory(), folder, record_losses, **exact)

    return train_in_turn(workload, make, record_losses)


def sft_trainer(
    task: TaskWorkload, workload: Workload, backbone: Any, folder: str, record_losses: bool, **settings: Any
) -> Any:
    """Return TRL's trainer of a task, whose rows come in their order.

    Args:
        task: the task and its rows.
        workload: number of steps and learning rate.
        backbone: gets the adapter.
        folder: what the trainer may write to.
        record_losses: whether to keep the loss of each step.
        **settings: further arguments of `SFTConfig`.
    """
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    class Recording(RecordsLosses, SFTTrainer):
        pass

    arguments = SFTConfig(
        output_dir=folder,
        per_device_train_batch_size=task.batch_size,
        max_steps=workload.num_steps,
        learning_rate=workload.learning_rate,
        seed=task.seed,
        max_length=None,
        train_sampling_strategy="sequential",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **settings,
    )
    # Rows are tokenised; the tokenizer only names the token of padding.
    words = Tokenizer(models.WordLevel({"<end>": 0}, "<end>"))
    return (Recording if record_losses else SFTTrainer)(
        model=get_peft_model(backbone, task.lora_config()),
        args=arguments,
        train_dataset=Dataset.from_list([dict(row) for row in task.rows]),
        processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>"),
    )
