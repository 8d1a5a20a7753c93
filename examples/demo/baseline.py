"""The same tasks the usual way: HF `Trainer` and plain PEFT, one task after another, on identical rows."""

from __future__ import annotations

import copy
import tempfile
import time
from typing import Any

from peft_mux.engine.tasks.active_task import ActiveTask


def train_one_by_one(backbone: Any, runs: list[ActiveTask], *, num_steps: int) -> tuple[float, int]:
    """Train every task alone for its first `num_steps` global batches.

    Args:
        backbone: the plain backbone, copied for each task and not changed.
        runs: the tasks whose rows and settings are used.
        num_steps: number of optimizer steps of each task.

    Returns:
        Seconds spent in `train()`, and number of tokens trained on (without padding).
    """
    seconds, tokens = 0.0, 0
    for run in runs:
        batches = [run.loader.batch(step) for step in range(num_steps)]
        with tempfile.TemporaryDirectory(prefix="peft-mux-baseline-") as folder:
            trainer = _trainer(copy.deepcopy(backbone), run, batches, folder)
            started = time.perf_counter()
            trainer.train()
            seconds += time.perf_counter() - started
        tokens += sum(batch.num_tokens for batch in batches)
    return seconds, tokens


def _trainer(backbone: Any, run: ActiveTask, batches: list[Any], folder: str) -> Any:
    from peft import get_peft_model
    from torch.utils.data import SequentialSampler
    from transformers import PrinterCallback, Trainer, TrainingArguments

    class InOrder(Trainer):
        """Trainer that takes the rows in the order in which they are given."""

        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    rows = [
        {"input_ids": s.input_ids.tolist(), "labels": s.labels.tolist(), "attention_mask": [1] * len(s)}
        for batch in batches
        for s in batch.sequences
    ]
    args = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=run.hyper.train_batch_size,
        max_steps=len(batches),
        learning_rate=run.hyper.learning_rate,
        lr_scheduler_type=run.hyper.lr_scheduler_type,
        optim=run.hyper.optim,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        use_cpu=str(backbone.device) == "cpu",
        disable_tqdm=True,
    )
    model = get_peft_model(backbone, copy.deepcopy(run.task.peft_config))
    trainer = InOrder(model=model, args=args, train_dataset=rows, data_collator=_padded)  # type: ignore[arg-type]
    trainer.remove_callback(PrinterCallback)
    return trainer


def _padded(features: list[dict[str, Any]]) -> dict[str, Any]:
    """Pad rows to the longest of their batch, as Trainer's own collators do."""
    import torch

    longest = max(len(feature["input_ids"]) for feature in features)
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {
        key: torch.tensor([list(f[key]) + [value] * (longest - len(f[key])) for f in features])
        for key, value in fill.items()
    }
