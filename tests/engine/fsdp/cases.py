"""Real processes that share one frozen backbone (FSDP2), and the same tasks in one process as a reference."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from torch.distributed.tensor import DTensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from peft_mux.data.batch import MuxBatch
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.engine.executor import Executor
from peft_mux.engine.fsdp import ShardedBackbone, shard_backbone
from peft_mux.engine.gradients import GradientSync
from peft_mux.engine.tasks.optimizer import non_finite_reason
from peft_mux.engine.work import StepWork
from peft_mux.modeling.model import MultiTaskPeftModel
from tests.engine.pipeline import stage_cases
from tests.engine.processes.cases import connected
from tests.packing.even_rows import even_rows

VOCABULARY, NUM_LAYERS, NUM_STEPS = 97, 4, 3
LENGTHS = {**stage_cases.LENGTHS, "f": (9, 13, 4)}
HTASKS = (("a", "b"), ("c",), ("d", "e"), ("f",))
LATE = "f"


@dataclass(frozen=True)
class Case:
    """One thing to train.

    Attributes:
        shape: of the backbone.
        recomputes: whether activations are checkpointed.
        max_tokens: of a pass.
        few: whether ranks but the first have rows of one task alone, so that numbers of passes differ much.
        poison: whether a weight of task "d" becomes NaN before the second step.
        arrives: whether a task is registered after the first step.
        ends: whether a task adapts embedding and head.
        splits: whether sequences that are longer than a pass are split into chains of passes.
    """

    shape: str
    recomputes: bool = False
    max_tokens: int = 40
    few: bool = False
    poison: bool = False
    arrives: bool = False
    ends: bool = False
    splits: bool = False


@dataclass
class Seen:
    """What a run showed to one process.

    Attributes:
        losses: of each task by step.
        failures: why a task ended.
        weights: final ones.
        bytes_by_step: of frozen weights received.
        passes: own and those of the process that had most, by step.
        local_bytes: of frozen weights between passes.
        whole_bytes: of all of them.
        closed_form: bytes of one pass.
        non_finite: tasks found in a forward pass of the last step's rows.
    """

    losses: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    weights: dict[str, dict[str, Any]] = field(default_factory=dict)
    bytes_by_step: list[int] = field(default_factory=list)
    passes: list[tuple[int, int]] = field(default_factory=list)
    local_bytes: int = 0
    whole_bytes: int = 0
    closed_form: int = 0
    non_finite: list[str] = field(default_factory=list)


def backbone(shape: str) -> Any:
    """Return a tiny random model: hidden 32, 4 layers, fp32; the vocabulary divides by neither 2 nor 3."""
    torch.manual_seed(3)
    if shape == "gpt2":
        return GPT2LMHeadModel(
            GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=NUM_LAYERS, n_head=4, n_positions=64)
        )
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": NUM_LAYERS}
    sizes |= {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    if shape == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=4, num_experts_per_tok=2))
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=shape == "tied"))


def adapters(case: Case) -> dict[str, LoraConfig]:
    """Return five unequal adapters; one begins at layer 2, where its backward passes could end by mistake."""
    attention, mlp, ends = ["q_proj", "v_proj"], ["gate_proj", "down_proj"], ["o_proj"]
    if case.shape == "gpt2":
        attention, mlp, ends = ["c_attn"], ["c_fc", "mlp.c_proj"], ["c_attn"]
    if case.ends:
        ends = [*ends, "wte"] if case.shape == "gpt2" else [*ends, "embed_tokens", "lm_head"]
    common: dict[str, Any] = {"init_lora_weights": "gaussian"}
    if case.shape == "mixtral":
        experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        return {
            "a": LoraConfig(r=4, target_modules="all-linear", **common),
            "b": LoraConfig(r=4, target_modules=attention, **common),
            "c": LoraConfig(r=2, target_modules=attention, layers_to_transform=[2, 3], lora_dropout=0.2, **common),
            "d": LoraConfig(r=3, target_modules=[], target_parameters=experts, **common),
            "e": LoraConfig(r=6, target_modules=ends, **common),
        }
    return {
        "a": LoraConfig(r=8, target_modules=[*attention, *mlp], lora_dropout=0.1, **common),
        "b": LoraConfig(r=4, target_modules=attention, **common),
        "c": LoraConfig(r=2, target_modules=attention, layers_to_transform=[2, 3], lora_dropout=0.2, **common),
        "d": LoraConfig(r=16, target_modules=mlp, layers_to_transform=[0, 2], **common),
        "e": LoraConfig(r=6, target_modules=ends, **common),
    }


def late_adapter(case: Case) -> LoraConfig:
    """Return the adapter of the task that arrives; it adapts embedding and head if other tasks do."""
    targets = ["c_attn", "mlp.c_fc"] if case.shape == "gpt2" else ["k_proj", "up_proj"]
    if case.ends:
        targets += ["wte"] if case.shape == "gpt2" else ["embed_tokens", "lm_head"]
    return LoraConfig(r=5, target_modules=targets, lora_dropout=0.1, init_lora_weights="gaussian")


def mux_model(case: Case) -> MultiTaskPeftModel:
    """Return the model in training mode; B is not zero, so that all gradients count."""
    configs = adapters(case)
    if case.arrives and case.ends:
        configs["e"] = LoraConfig(r=6, target_modules=["c_attn" if case.shape == "gpt2" else "o_proj"])
    seeds = {name: index for index, name in enumerate(configs)}
    model = MultiTaskPeftModel(backbone(case.shape), configs, seeds=seeds, verify=False)
    for name in model.tasks:
        stage_cases.wake(model.task_parameters(name))
    if case.recomputes:
        model.activation_checkpointing_enable()
    return model.train()


def step_work(case: Case, step: int, names: list[str], rank: int, world_size: int) -> StepWork:
    """Return this process's rows of the global batches of a step."""
    batches = {name: stage_cases.random_batch(name, step, LENGTHS[name]) for name in names}
    micro_batches: list[MuxBatch] = []
    for htask in HTASKS:
        fused = [batches[name] for name in htask if name in batches]
        if not fused:
            continue
        own = even_rows(fused, world_size)
        if case.few and world_size > 1:
            everything = [list(range(len(batch.sequences))) for batch in fused]
            nothing: list[list[int]] = [[] for _ in fused]
            own = [everything if (rank == 0) != (htask == ("c",)) else nothing for rank in range(world_size)]
            own[2:] = [nothing for _ in own[2:]]
        micro_batches += ChunkPackingCollator(split_long_sequences=case.splits).micro_batches(
            fused, max_tokens=case.max_tokens, only=own[rank]
        )
    counts = {name: one.num_tokens for name, one in batches.items()}
    return StepWork(tuple(batches), tuple(micro_batches), counts)


def train(case: Case, rank: int, folder: Path, sharded: bool) -> Seen:
    """Train as the trainer does: verdicts first, then the steps of those that passed."""
    world_size = int(os.environ["WORLD_SIZE"]) if sharded else 1
    model, seen = mux_model(case), Seen()
    seen.whole_bytes = frozen_bytes(model)
    executor, whole = make_executor(model, rank, world_size) if sharded else (Executor(model), None)
    optimizers: dict[str, Any] = {name: stage_cases.optimizer_of(model, name, folder) for name in model.tasks}
    for step in range(NUM_STEPS):
        if case.arrives and step == 1:
            model.register_tasks({LATE: late_adapter(case)}, seeds={LATE: 9})
            stage_cases.wake(model.task_parameters(LATE))
            model.train()
            optimizers[LATE] = stage_cases.optimizer_of(model, LATE, folder)
        if case.poison and step == 1:
            poison(model)
        names = [name for name in optimizers if name not in seen.failures]
        work = step_work(case, step, names, rank, world_size)
        before = 0 if whole is None else whole.num_bytes
        result = executor.run(work)
        if whole is not None:
            seen.bytes_by_step.append(whole.num_bytes - before)
            own = len(work.micro_batches)
            seen.passes.append((own, max(n[0] for n in executor.sync.processes.exchange([own]))))
        for name in names:
            norm = optimizers[name].gradient_norm()
            loss = result.losses[name].item()
            seen.losses.setdefault(name, []).append(loss)
            reason = non_finite_reason(loss, norm.item())
            if reason is not None:
                seen.failures[name] = reason
            else:
                optimizers[name].step(norm)
            optimizers[name].zero_gradients()
    seen.non_finite = executor.non_finite_tasks(
        step_work(case, NUM_STEPS, list(optimizers), rank, world_size).micro_batches
    )
    if whole is not None:
        seen.local_bytes, seen.closed_form = local_bytes(model), bytes_per_pass(whole, world_size)
    seen.weights = {
        name: {key: value.detach().clone().numpy() for key, value in model.task_parameters(name).items()}
        for name in optimizers
    }
    return seen


def make_executor(model: MultiTaskPeftModel, rank: int, world_size: int) -> tuple[Executor, ShardedBackbone]:
    """Divide a model's backbone among the processes, and return what runs it."""
    processes = connected(20.0)
    whole = shard_backbone(model, processes)
    return Executor(model, sync=GradientSync(model, processes, is_deferred=True), sharded=whole), whole


def local_bytes(model: MultiTaskPeftModel) -> int:
    """Return the bytes of frozen weights that this process holds between passes."""
    own = {id(item) for name in model.tasks for item in model.task_parameters(name).values()}
    frozen = [item for item in model.backbone.parameters() if id(item) not in own]
    return sum((item.to_local() if isinstance(item, DTensor) else item).nbytes for item in frozen)


def bytes_per_pass(backbone: ShardedBackbone, num_shards: int, virtual_stage: int = 0) -> int:
    """Return the bytes of frozen weights that a process receives in one forward and backward: the closed form.

    A unit of weights `[K_i, ...]` over n processes brings the other n - 1 shards of `ceil(K_i / n)` rows each.
    """
    units = {id(unit) for stage in backbone.virtual_stages for unit in backbone.forward_units(stage)}
    total = 0
    for unit in backbone.forward_units(virtual_stage) + backbone.backward_units(virtual_stage):
        stack = [unit]
        while stack:
            module = stack.pop()
            for item in module.parameters(recurse=False):
                if isinstance(item, DTensor):
                    rows = -(-item.shape[0] // num_shards)
                    total += (num_shards - 1) * rows * (item.numel() // item.shape[0]) * item.element_size()
            stack += [child for child in module.children() if id(child) not in units]
    return total


@torch.no_grad()
def poison(model: MultiTaskPeftModel) -> None:
    """Spoil one weight of task "d"."""
    for key, parameter in model.task_parameters("d").items():
        if ".2." in key and "lora_A" in key:
            parameter[0, 0] = float("nan")


def frozen_bytes(model: MultiTaskPeftModel) -> int:
    """Return the bytes of what no task trains, a tied weight once."""
    own = {id(item) for name in model.tasks for item in model.task_parameters(name).values()}
    frozen = [item for item in model.backbone.parameters() if id(item) not in own]
    return sum(item.numel() * item.element_size() for item in frozen)


def train_sharded(rank: int, case: Case, folder: Path) -> Seen:
    """Train a case as one of several processes."""
    return train(case, rank, folder, sharded=True)


def changed_between_passes(rank: int | None) -> tuple[dict[str, Any], bool]:
    """Triple the frozen weights of layer 1 after a forward; return gradients, and whether the weights were freed.

    Args:
        rank: of several processes; `None` for one that holds everything.
    """
    case = Case("llama")
    model = mux_model(case)
    whole = None if rank is None else make_executor(model, rank, int(os.environ["WORLD_SIZE"]))[1]
    batch = step_work(case, 0, ["a"], 0, 1).micro_batches[0]
    layer: Any = model.backbone.base_model.layers[1]
    read: list[torch.Tensor] = []
    layer.mlp.register_forward_pre_hook(lambda module, _: read.append(module.down_proj.base_layer.weight))
    output = model(batch)
    freed = read[0].untyped_storage().size() == 0
    own = {id(item) for name in model.tasks for item in model.task_parameters(name).values()}
    with torch.no_grad():
        for parameter in layer.parameters():
            if id(parameter) not in own:
                local = parameter.data if whole is None else parameter.to_local()
                local.mul_(3.0)
    output.losses.sum().backward()
    return {
        key: item.grad.numpy().copy() for key, item in model.task_parameters("a").items() if item.grad is not None
    }, freed


def used_through_a_view(rank: int, folder: Path) -> dict[str, Any]:
    """Use one task's model as PEFT's, and save it."""
    model = mux_model(Case("llama"))
    make_executor(model, rank, int(os.environ["WORLD_SIZE"]))
    model.eval()
    with torch.no_grad():
        logits = model.task_view("a")(input_ids=torch.arange(1, 8)[None]).logits.numpy()
    model.save_task("a", folder / f"a{rank}")
    return {"logits": logits}
