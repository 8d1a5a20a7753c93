"""Tasks that balance the routers of a small mixture of experts, over any layout of processes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig
from transformers import MixtralConfig, MixtralForCausalLM

from peft_mux import Task
from tests.engine.losses import cases
from tests.engine.losses.cases import Trained
from tests.invariants import mux_lab as lab
from tests.parallel.replicas.layout_cases import Watcher

OWN = 0.4
"""The model's own coefficient: large, so that a wrong loss shows."""

ON_EXPERTS = LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj", "mlp.gate.weight"])


@cache
def backbone() -> Any:
    """Return a small mixture whose routers prefer some experts; the same at every call."""
    config = MixtralConfig(
        vocab_size=lab.VOCABULARY,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        router_aux_loss_coef=OWN,
    )
    model = MixtralForCausalLM(config)
    lab.fill(model, 0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("gate.weight"):
                weight.mul_(5.0)
    return model


def alike(seed: int, count: int) -> list[dict[str, Any]]:
    """Return rows that begin with the same 20 tokens."""
    first, *rest = lab.rows(seed, count + 1, 20, 20)
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 7, size=count)
    return [
        {"input_ids": first["input_ids"] + row["input_ids"][:length]} for row, length in zip(rest, lengths, strict=True)
    ]


def with_long_prompts(seed: int, count: int) -> list[dict[str, Any]]:
    """Return rows with only the last three tokens as targets, so that parts of them have none."""
    rows = [row["input_ids"] for row in lab.rows(seed, count, 5, 40)]
    return [{"input_ids": ids, "labels": [-100] * (len(ids) - 3) + ids[-3:]} for ids in rows]


def tasks(*, on_experts: bool = True) -> list[Task]:
    """Return tasks of unequal batches, losses and coefficients, and one that adapts experts and routers."""
    found = [
        task("sft", with_long_prompts(1, 11), train_batch_size=5),
        task("alike", alike(2, 9), router_aux_loss_coef=0.2),
        task("dpo", cases.pairs(3, 9), objective="dpo", train_batch_size=3),
        task("kto", cases.answers(5, 11), objective="kto", router_aux_loss_coef=1.0),
        task("without", lab.rows(4, 9, 3, 15), router_aux_loss_coef=0.0),
    ]
    if on_experts:
        found.append(task("experts", lab.rows(6, 9, 3, 15), config=ON_EXPERTS, router_aux_loss_coef=2.0))
    return found


def task(name: str, rows: Sequence[Any], config: LoraConfig | None = None, **settings: Any) -> Task:
    """Return a task of four steps."""
    options: dict[str, Any] = {"train_batch_size": 4, "learning_rate": 3e-3, "max_steps": 4, "seed": 1, **settings}
    adapter = config or LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"])
    return Task(name=name, peft_config=adapter, train_dataset=list(rows), **options)


def train_all(
    rank: int, folder: Path, model: Any, arguments: dict[str, Any], names: Sequence[str] | None = None
) -> Trained:
    """Train some of the tasks, by default all that the layout can have, on a folder's model or on one made here."""
    on_experts = not {"tensor_parallel_size", "pipeline_parallel_size", "replicas"} & arguments.keys()
    chosen = [one for one in tasks(on_experts=on_experts) if names is None or one.name in names]
    return cases.observed(folder, model or backbone(), chosen, Watcher(), **arguments)
