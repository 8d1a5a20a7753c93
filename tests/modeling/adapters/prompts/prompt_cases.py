"""What the tests of prompts share: a configuration of each form, and plain PEFT's own model and loss as the judge."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from peft import (
    CartridgeConfig,
    CPTConfig,
    LoraConfig,
    MultitaskPromptTuningConfig,
    PeftConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    TaskType,
    get_peft_model,
)
from transformers import Trainer, get_scheduler

from peft_mux import ChunkPackingCollator, MultiTaskPeftModel, Task
from peft_mux.data.batch import MuxBatch
from peft_mux.data.task_batch import TokenSequence
from peft_mux.trainer.trainer import MultiTaskTrainer
from tests.invariants import mux_lab as lab

LM = TaskType.CAUSAL_LM


def config_of(form: str, task_type: TaskType = LM) -> PeftConfig:
    """Return a configuration of a form of prompts; "lora" is one of none."""
    config: PeftConfig = {
        "prompt": lambda: PromptTuningConfig(task_type=LM, num_virtual_tokens=3),
        "words": lambda: PromptTuningConfig(task_type=LM, num_virtual_tokens=4, prompt_tuning_init="SAMPLE_VOCAB"),
        "mlp": lambda: PromptEncoderConfig(task_type=LM, num_virtual_tokens=4, encoder_hidden_size=16),
        "lstm": lambda: PromptEncoderConfig(
            task_type=LM, num_virtual_tokens=2, encoder_hidden_size=8, encoder_reparameterization_type="LSTM"
        ),
        "multitask": lambda: MultitaskPromptTuningConfig(task_type=LM, num_virtual_tokens=3, num_ranks=2),
        "cpt": lambda: CPTConfig(
            task_type=LM, cpt_token_ids=list(range(5, 13)), cpt_mask=[1] * 8, cpt_tokens_type_mask=list(range(1, 9))
        ),
        "prefix": lambda: PrefixTuningConfig(task_type=LM, num_virtual_tokens=5),
        "projected": lambda: PrefixTuningConfig(
            task_type=LM, num_virtual_tokens=2, prefix_projection=True, encoder_hidden_size=8
        ),
        "cartridge": lambda: CartridgeConfig(task_type=LM, num_virtual_tokens=4),
        "lora": lambda: LoraConfig(task_type=LM, r=4, target_modules="all-linear"),
    }[form]()
    config.task_type = task_type
    return config


PROMPTS = ("prompt", "words", "mlp", "lstm", "multitask", "cpt", "prefix", "projected", "cartridge")
"""Every form of prompts: each type, and each way of PEFT's that computes another thing."""


def rows_of(form: str, count: int = 3, low: int = 4, high: int = 20) -> list[list[int]]:
    """Return rows of random tokens, others for each form."""
    return [row["input_ids"] for row in lab.rows(sum(map(ord, form)), count, low, high)]


def packed(
    model: MultiTaskPeftModel, rows: Mapping[str, Sequence[list[int]]], *, seed: int = 1, **options: Any
) -> MuxBatch:
    """Return the rows of tasks as one stream for a model."""
    given = [{"task": task, "input_ids": ids, "seed": seed} for task, own in rows.items() for ids in own]
    return ChunkPackingCollator(virtual_labels=model.virtual_labels, **options)(given)


def plain(config: PeftConfig, seed: int, backbone: Any = None) -> tuple[Any, dict[str, torch.nn.Parameter]]:
    """Return plain PEFT's model of one task, and its trained parameters without the adapter's id."""
    torch.manual_seed(seed)
    model: Any = get_peft_model(backbone or lab.tiny_llama(), copy.deepcopy(config))
    return model, trained(model)


def trained(model: Any) -> dict[str, torch.nn.Parameter]:
    """Return the trained parameters of plain PEFT's model, without the adapter's id."""
    return {name.replace(".default", ""): item for name, item in model.named_parameters() if item.requires_grad}


def plain_loss(model: Any, rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return plain PEFT's loss of rows, one at a time, as a mean over the targets of all."""
    losses, counts = [], []
    for ids in rows:
        row = torch.tensor([list(ids)])
        losses.append(model(input_ids=row, labels=row, **task_ids(model)).loss)
        counts.append(len(ids) - 1 + _more_targets(model.peft_config["default"]))
    return torch.stack([loss * count for loss, count in zip(losses, counts, strict=True)]).sum() / sum(counts)


def task_ids(model: Any) -> dict[str, torch.Tensor]:
    """Return the inputs that multitask prompts need in addition to tokens."""
    return {"task_ids": torch.zeros(1, dtype=torch.int64)} if hasattr(model.active_peft_config, "num_tasks") else {}


def _more_targets(config: Any) -> int:
    """Return how many targets a prompt adds to a row: its first token, which a virtual one predicts, and answers."""
    if isinstance(config, CPTConfig):
        types: Any = config.cpt_tokens_type_mask
        return 1 + sum(kind > 0 and kind % 4 == 0 for kind in types[1:])
    return 0 if isinstance(config, (PrefixTuningConfig, CartridgeConfig, LoraConfig)) else 1


def task_of(form: str, **settings: Any) -> Task:
    """Return a task of a form of prompts, whose name is the form's."""
    options: dict[str, Any] = {"train_batch_size": 4, "learning_rate": 3e-2, "max_steps": 6, "seed": 3, **settings}
    if form == "lora":
        options["learning_rate"] = 3e-3
    rows = [{"input_ids": ids} for ids in rows_of(form, 10)]
    return Task(name=form, peft_config=config_of(form), train_dataset=rows, **options)


def rows_loss(model: Any, sequences: Sequence[TokenSequence]) -> torch.Tensor:
    """Return plain PEFT's loss of rows that may begin with virtual tokens, which PEFT adds itself."""
    return plain_loss(model, [ids.input_ids[ids.num_virtual_tokens :].tolist() for ids in sequences])


def judge(
    trainer: MultiTaskTrainer,
    task: Task,
    backbone: Any = None,
    loss_of: Callable[[Any, Sequence[TokenSequence]], torch.Tensor] = rows_loss,
) -> lab.Verdict:
    """Train one task alone with plain PEFT and an ordinary loop, on the same rows."""
    run = trainer.table[task.name]
    hyper = run.hyper
    model, own = plain(task.peft_config, hyper.seed, backbone)
    model.train()
    parameters = list(own.values())
    decaying = {name.replace(".default", "") for name in Trainer.get_decay_parameter_names(None, model)}  # type: ignore[arg-type]
    groups = [
        {"params": [own[name] for name in own if name in decaying], "weight_decay": hyper.weight_decay},
        {"params": [own[name] for name in own if name not in decaying], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=hyper.learning_rate)
    schedule = get_scheduler(hyper.lr_scheduler_type, optimizer, int(hyper.warmup_steps), run.num_steps)
    losses = []
    for step in range(run.num_steps):
        loss = loss_of(model, run.loader.batch(step).sequences)
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(parameters, hyper.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return lab.Verdict(losses, {key: value.detach() for key, value in own.items()})
