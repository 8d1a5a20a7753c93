"""A small model on disk for examples and notebooks: made, taught a few sentences, and saved, without network."""

from __future__ import annotations

from pathlib import Path

from peft_mux.demo.sentences import corpus
from peft_mux.demo.small_llama import make_backbone, make_tokenizer, pretrain
from peft_mux.demo.task_rows import demo_tasks

_NUM_LINES = 2_000


def save_small_model(folder: str | Path, *, num_layers: int = 2, num_steps: int = 120) -> float:
    """Save a Llama that has read sentences from templates, with its tokenizer; return its loss on them.

    Args:
        folder: where model and tokenizer are written.
        num_layers: layers of the model, each of 128 features.
        num_steps: steps for which all of it is trained on the sentences; seconds on a CPU.
    """
    lines = corpus(_NUM_LINES)
    rows = ["".join(row.values()) for task in demo_tasks() for row in task.train_rows]
    tokenizer = make_tokenizer([*lines, *rows])
    model = make_backbone(tokenizer, num_layers=num_layers)
    loss = pretrain(model, tokenizer, lines, num_steps=num_steps)
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    return loss
