"""Engines over any layout of real processes: what each process of a launch does, and one process as the reference.

A `Case` says what is trained over which layout. `run_cases` is what each process of a launch does; `train` with no
processes is the reference. Backbones are tiny random models of every family.
"""

from __future__ import annotations

import gc
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.pytorch_utils import Conv1D

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.checkpoint.task_state import TaskState, split_state
from peft_mux.data.batch import MuxBatch
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.task_batch import IGNORE_INDEX, TaskBatch, TokenSequence
from peft_mux.engine.executor import Executor
from peft_mux.engine.gradients import GradientSync
from peft_mux.engine.model_part import register_tasks
from peft_mux.engine.processes import Processes
from peft_mux.engine.tasks.optimizer import TaskOptimizer, non_finite_reason
from peft_mux.engine.tasks.setup import resolve_tasks
from peft_mux.engine.work import StepWork
from peft_mux.modeling.backbone.modules import find_layers
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.parallel.cells import CellSync
from peft_mux.parallel.fsdp import shard_backbone
from peft_mux.parallel.layout import parse_layout
from peft_mux.parallel.parallelize import register_parts
from peft_mux.parallel.pipeline.executor import PipelineExecutor
from peft_mux.parallel.pipeline.links import PipelineLinks
from peft_mux.parallel.pipeline.pipeline_plan import PipelinePlan
from peft_mux.parallel.pipeline.stage import StageLayout, StageModel
from peft_mux.parallel.task_states import gather_parts
from peft_mux.parallel.tensor.interleaving import Interleaving, TurnLinks
from peft_mux.parallel.tensor.parallel import TensorLinks, TensorParallelModel
from peft_mux.scheduler.pipeline.simulator import simulate
from peft_mux.scheduler.pipeline.template import build_template
from peft_mux.scheduler.plan import BucketLoad, PipelineTemplate
from peft_mux.task import Task, resolve
from tests.engine.processes.cases import connected
from tests.packing.even_rows import even_rows

VOCABULARY, HIDDEN_SIZE, NUM_LAYERS, NUM_STEPS = 61, 32, 4, 3
HTASKS = (("a", "b"), ("c",), ("d", "e", "f"))
BUCKETS = ((0, 1), (2,))
NUM_SLOTS = (4, 3)
MAX_TOKENS = (30, 15, 40)
LENGTHS = {"a": (3, 9, 17, 5), "b": (12, 4, 23), "c": (7, 6, 19, 2), "d": (25, 3, 11), "e": (5, 31, 9), "f": (9, 13)}
FIRST = tuple("abcde")
POISONED, LATE, ODD = "d", "f", "a"


@dataclass(frozen=True)
class Case:
    """One thing to train.

    Attributes:
        kind: model type of the backbone.
        layout: replicas of the run.
        fields: changed fields of the backbone's configuration.
        schedule: of the template.
        num_chunks: virtual stages of a process.
        layers_per_stage: by default equal.
        sharded: whether replicas share the frozen weights (FSDP2).
        recomputes: whether activations are checkpointed.
        bf16: whether it runs under autocast.
        poison: whether a weight of one task becomes NaN before the second step.
        arrives: whether a task is registered before the second step.
        adapts_ends: whether tasks adapt the embedding and the head.
        adapts_experts: whether a task adapts the experts of a mixture.
        apart: whether each replica has rows of other tasks, so that numbers of passes differ.
        splits: whether sequences that are longer than a pass are split into chains of passes.
        holds_back: whether memory is limited so that few micro-batches are in flight.
        turns: number of passes that take turns; 0 for one after another.
        window: whether all steps are one window that is not flushed.
        odd: whether the first update of one task fails on the last process alone.
        classifying: names of tasks that classify sequences; all if the backbone is a classifier.
        tasks: names of those that train from the beginning.
        num_steps: of the training.
    """

    kind: str = "llama"
    layout: str = "<1,2>"
    fields: tuple[tuple[str, Any], ...] = ()
    schedule: Any = "1f1b"
    num_chunks: int = 1
    layers_per_stage: tuple[int, ...] | None = None
    sharded: bool = False
    recomputes: bool = False
    bf16: bool = False
    poison: bool = False
    arrives: bool = False
    adapts_ends: bool = False
    adapts_experts: bool = False
    apart: bool = False
    splits: bool = False
    holds_back: bool = False
    turns: int = 0
    window: bool = False
    odd: bool = False
    classifying: tuple[str, ...] = ()
    tasks: tuple[str, ...] = FIRST
    num_steps: int = NUM_STEPS

    def classifies(self, name: str) -> bool:
        """Whether a task classifies sequences."""
        return "num_labels" in dict(self.fields) or name in self.classifying

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return parse_layout(self.layout).world_size

    @property
    def alone(self) -> Case:
        """The same in one process, whose passes hold whole sequences and compute all rows."""
        same = ("kind", "fields", "bf16", "poison", "arrives", "adapts_ends", "adapts_experts", "tasks", "num_steps")
        same += ("classifying",)
        return Case(layout="<1,1>", **{name: getattr(self, name) for name in same})


PLAIN = Case()


# ------------------------------------------------------------------ backbones

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WHERE_KNOWN: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 6,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    **dict.fromkeys("attention_dropout hidden_dropout residual_dropout dropout".split(), 0.0),
    **dict.fromkeys("embd_pdrop attn_pdrop resid_pdrop".split(), 0.0),
}
"""Set where the configuration has a field of this name."""

_MORE: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 5},
    "granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.7,
        "attention_multiplier": 0.3,
        "logits_scaling": 2.0,
    },
    "cohere": {"logit_scale": 0.5},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
}


def config_of(kind: str, **changed: Any) -> Any:
    """Return a small configuration of a model type; layers alternate where some of the family's slide."""
    known = CONFIG_MAPPING[kind]().to_dict()
    fields = {**_SIZES, **{name: value for name, value in _WHERE_KNOWN.items() if name in known}, **_MORE.get(kind, {})}
    fields |= changed
    if "sliding_attention" in (known.get("layer_types") or ()):
        fields["layer_types"] = ["sliding_attention", "full_attention"] * (fields["num_hidden_layers"] // 2)
    config = CONFIG_MAPPING[kind](**fields)
    if kind == "gemma2":
        config._attn_implementation = "eager"  # only this path of transformers honours the soft-cap of the scores
    return config


def backbone(kind: str, **changed: Any) -> Any:
    """Return a tiny random model whose weights are large enough that every layer matters."""
    torch.manual_seed(3)
    make = AutoModelForSequenceClassification if "num_labels" in changed else AutoModelForCausalLM
    model = make.from_config(config_of(kind, **changed), dtype=torch.float32)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            draws = 0.15 * torch.randn(weight.shape)
            weight.copy_(1.0 + draws if weight.ndim == 1 and name.endswith("weight") else draws)
    return model


def adapters(model: Any, case: Case = PLAIN) -> dict[str, LoraConfig]:
    """Return unequal adapters: of other ranks, layers and dropouts; some without weights on some stages."""
    linears = [name for name, module in model.named_modules() if type(module) in (nn.Linear, Conv1D)]
    inner = [name for name in linears if "layers." in name or ".h." in name]
    attention, mlp = [name for name in inner if "att" in name], [name for name in inner if "mlp" in name]
    mixes = any("experts" in name for name, _ in model.named_parameters())
    few = [name for name in attention if name.rpartition(".")[2] not in ("v_proj", "k_proj")]
    ends = ["wte" if "gpt2" in case.kind else "embed_tokens"] if case.adapts_ends else []
    if case.adapts_ends and not model.config.tie_word_embeddings:
        ends.append("lm_head")
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    last = model.config.num_hidden_layers - 1
    configs = {
        "a": LoraConfig(r=8, target_modules=attention if mixes else inner, lora_dropout=0.1),
        "b": LoraConfig(r=3, target_modules=few),
        "c": LoraConfig(r=2, target_modules=_in_layers(attention, last - 1, last), lora_dropout=0.2, use_rslora=True),
        "d": LoraConfig(r=16, target_modules=_in_layers(mlp or few, 0, 1)),
        "e": LoraConfig(r=6, target_modules=[*few, *ends]),
    }
    if case.adapts_experts:
        configs["d"] = LoraConfig(r=3, target_modules=[], target_parameters=experts)
    for name in filter(case.classifies, configs):
        configs[name] = replace(configs[name], task_type="SEQ_CLS")
    return {name: configs[name] for name in case.tasks}


def _in_layers(names: Sequence[str], *layers: int) -> list[str]:
    return [name for name in names if any(f".{layer}." in name for layer in layers)]


def mux_model(case: Case = PLAIN) -> MultiTaskPeftModel:
    """Return the whole model, in training mode; B is not zero, so that all gradients count."""
    whole = backbone(case.kind, **dict(case.fields))
    seeds = {name: index for index, name in enumerate(case.tasks)}
    model = MultiTaskPeftModel(whole, adapters(whole, case), seeds=seeds, verify=False)
    for name in model.tasks:
        wake(model.task_parameters(name))
    return model.train()


@torch.no_grad()
def wake(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Fill the factors of a task that begin at zero."""
    generator = torch.Generator().manual_seed(11)
    for key, parameter in sorted(parameters.items()):
        if "lora_B" in key or "embedding_A" in key:
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


# ----------------------------------------------------------------------- work


def random_batch(name: str, step: int, *, num_targets: int = 64, classifies: bool = False) -> TaskBatch:
    """Return random rows of a task; their last tokens are targets, or each has a class."""
    rng = np.random.default_rng([step, ord(name)])
    sequences = []
    for row, length in enumerate(LENGTHS[name]):
        ids = rng.integers(1, VOCABULARY, size=length)
        labels = np.where(np.arange(length) < length - num_targets, IGNORE_INDEX, ids)
        sequences.append(TokenSequence(ids, labels, row, *([row % 2] if classifies else [])))
    return TaskBatch(name, step, seed=ord(name), sequences=tuple(sequences))


def step_work(
    step: int = 0, tasks: Sequence[str] = FIRST, case: Case = PLAIN, *, replica: int = 0, num_replicas: int = 1
) -> StepWork:
    """Return what a replica does of the global batches of a step."""
    batches = {name: random_batch(name, step, classifies=case.classifies(name)) for name in tasks}
    collator = ChunkPackingCollator(chunk_size=8, split_long_sequences=True) if case.splits else ChunkPackingCollator()
    micro_batches: list[MuxBatch] = []
    for number, (htask, most) in enumerate(zip(HTASKS, MAX_TOKENS, strict=True)):
        fused = [batches[name] for name in htask if name in batches]
        if not fused:
            continue
        own = even_rows(fused, num_replicas)[replica]
        if case.apart:
            own = [list(range(len(batch.sequences) if (number == 0) == (replica == 0) else 0)) for batch in fused]
        micro_batches += collator.micro_batches(fused, max_tokens=16 if case.splits else most, only=own)
    return StepWork(tuple(batches), tuple(micro_batches), {name: one.num_tokens for name, one in batches.items()})


def optimizer_of(model: MultiTaskPeftModel, name: str, folder: Path, **settings: Any) -> TaskOptimizer | None:
    """Return a task's optimizer; none in a process where it has no weights. It clips, and decays."""
    parameters = model.task_parameters(name)
    if not parameters:
        return None
    args = MultiTaskTrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none")
    # Not faster: if a gradient is almost zero, AdamW takes a step from its rounding error.
    hyper = {"learning_rate": 1e-3, "weight_decay": 0.01, "max_grad_norm": 0.05, "max_steps": 9, **settings}
    task = Task(name=name, peft_config=LoraConfig(), train_dataset=[{"input_ids": [1, 2]}], **hyper)
    return TaskOptimizer(name, dict(parameters), resolve(task, args), 9, args, model.registry.slab_of(name))


def loads_of(num_stages: int) -> list[BucketLoad]:
    """Return loads of both buckets, the second one slower."""
    return [
        BucketLoad(
            name=f"bucket {index}",
            forward_s=(1.0 + index,) * num_stages,
            activation_bytes=(size,) * num_stages,
            num_micro_batches=count,
        )
        for index, (size, count) in enumerate(zip((1000, 700), NUM_SLOTS, strict=True))
    ]


def template_of(case: Case, num_stages: int) -> PipelineTemplate:
    """Return the case's template over both buckets."""
    loads, limit = loads_of(num_stages), [2600] * num_stages if case.holds_back else None
    template = build_template(loads, case.schedule, num_chunks=case.num_chunks, memory_limit_bytes=limit)
    assert limit is None or max(simulate(template, loads).peak_bytes) <= limit[0]
    return template


def plan_of(num_stages: int, schedule: Any = "1f1b", num_chunks: int = 1, *, holds_back: bool = False) -> PipelinePlan:
    """Return a plan of both buckets."""
    template = template_of(Case(schedule=schedule, num_chunks=num_chunks, holds_back=holds_back), num_stages)
    return PipelinePlan(template, HTASKS, BUCKETS, tuple(loads_of(num_stages)))


# -------------------------------------------------------------------- engines


class Engine:
    """The part of a case that one process holds, as `ParallelPart` makes it, and what runs it."""

    def __init__(self, case: Case, processes: Processes) -> None:
        self.case, self.processes, self.layout = case, processes, parse_layout(case.layout)
        self.place = self.layout.place(processes.rank)
        replica = self.layout.replicas[self.place.replica]
        self.model, stage, self.is_whole = mux_model(case), None, replica.num_gpus == 1
        whole_bytes = frozen_bytes(self.model)
        if replica.pp > 1 or case.num_chunks > 1:
            layers = len(find_layers(self.model.backbone).layers)  # type: ignore[union-attr]
            options: dict[str, Any] = {"num_chunks": case.num_chunks, "layers_per_stage": case.layers_per_stage}
            stage = StageModel(self.model, StageLayout.of(layers, replica.pp, **options), self.place.stage)
        self.links = self.tensor_parallel = interleaving = None
        if self.layout.is_tensor_parallel:
            self.links = TurnLinks(TensorLinks(self.layout.tensor_groups, processes))
            self.tensor_parallel = TensorParallelModel(self.model, self.links)
            if case.turns:
                interleaving = Interleaving(self.model, self.links, width=case.turns, recomputes=case.recomputes)
        self.sharded = None
        if case.sharded:
            self.sharded = shard_backbone(self.model, processes, stage, None if stage is None else self.layout)
        self.share = frozen_bytes(self.model) / whole_bytes
        if case.recomputes:
            self.model.activation_checkpointing_enable()
        if self.layout.is_data_parallel:
            sync = GradientSync(self.model, processes, is_deferred=case.sharded)
        else:
            sync = CellSync(self.model, processes, self.layout, is_deferred=case.sharded)
        shared: dict[str, Any] = {"bf16": case.bf16, "sync": sync}
        if stage is not None:
            plan = plan_of(replica.pp, case.schedule, case.num_chunks, holds_back=case.holds_back)
            shared |= {"interleaving": interleaving, "sharded": self.sharded, "pipelines": self.layout.pipelines}
            self.executor = PipelineExecutor(stage, plan, processes, **shared)
        else:
            if any(one.pp > 1 for one in self.layout.replicas):
                PipelineLinks(self.layout.pipelines, case.num_chunks, processes)  # all processes create the groups
            self.executor = Executor(self.model, runner=interleaving or self.sharded, **shared)

    def work(self, step: int, tasks: Sequence[str]) -> StepWork:
        """Return what this process's replica does of a step."""
        replicas = {"replica": self.place.replica, "num_replicas": self.layout.num_replicas}
        return step_work(step, tasks, self.case, **replicas)

    def register(self, name: str, folder: Path) -> None:
        """Let a task join, with the weights that the whole model would draw."""
        args = MultiTaskTrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none")
        targets = "all-linear" if self.case.kind != "gpt2" else ["c_attn", "c_fc"]
        if self.case.adapts_ends:
            targets = ["o_proj", "embed_tokens", "lm_head"]
        task_type = "SEQ_CLS" if self.case.classifies(name) else None
        config = LoraConfig(r=5, target_modules=targets, lora_dropout=0.1, task_type=task_type)
        rows, num_labels = [{"input_ids": [1, 2]}], 3 if task_type else None
        task = Task(name=name, peft_config=config, train_dataset=rows, seed=9, max_steps=9, num_labels=num_labels)
        tasks = resolve_tasks([task], args)
        if self.is_whole:
            register_tasks(self.model, tasks)
        else:
            register_parts(self.model, tasks, self.tensor_parallel)
        self.model.train()

    def states(self, optimizers: Mapping[str, Any]) -> dict[str, TaskState | None]:
        """Return the whole states of all tasks on the first process."""
        return {
            name: gather_parts(
                self.processes,
                self.layout,
                self.model.registry.pieces_of(name),
                split_state(self.model.task_parameters(name), optimizer),
            )
            for name, optimizer in optimizers.items()
        }

    def close(self) -> None:
        """Close all connections; all processes call this."""
        self.processes.wait_for_all()
        self.executor.close()
        if self.links is not None:
            self.links.links.close()


def frozen_bytes(model: MultiTaskPeftModel) -> int:
    """Return the memory of frozen weights that this process holds between passes, each storage once."""
    own = {id(item) for name in model.tasks for item in model.task_parameters(name).values()}
    frozen = [item for item in model.backbone.parameters() if id(item) not in own]
    storages = [(item.to_local() if isinstance(item, DTensor) else item).untyped_storage() for item in frozen]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@torch.no_grad()
def poison(model: MultiTaskPeftModel) -> None:
    """Spoil weights of one task in one layer."""
    for key, parameter in model.task_parameters(POISONED).items():
        if ".1." in key and "lora_A" in key:
            parameter.fill_(float("nan"))


# ------------------------------------------------------------------- training


@dataclass
class Seen:
    """What a case showed to one process.

    Attributes:
        losses: of each task by step.
        norms: likewise, of gradients before clipping.
        failures: why a task ended.
        states: final whole ones, on the first process.
        evaluated: losses of this replica's rows in a forward pass before training.
        logits: of some sequences before training; `None` where the process has none.
        generated: tokens before training; `None` on a stage.
        non_finite: tasks found in a forward pass after training.
        share: of the whole's frozen bytes, which this process holds between passes.
        most_in_flight: micro-batches of the last step.
        held_bytes: keys and values that are left.
    """

    losses: dict[str, list[float]] = field(default_factory=dict)
    norms: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    states: dict[str, TaskState | None] = field(default_factory=dict)
    evaluated: dict[str, float] = field(default_factory=dict)
    logits: list[np.ndarray] | None = None
    generated: list[list[int]] | None = None
    non_finite: list[str] = field(default_factory=list)
    share: float = 1.0
    most_in_flight: int = 0
    held_bytes: int = 0


def train(case: Case, folder: Path, processes: Processes | None = None) -> Seen:
    """Train as the trainer does: verdicts first, then the steps of those that passed."""
    engine = Engine(case, processes or Processes())
    model, executor, seen = engine.model, engine.executor, Seen(share=engine.share)
    _evaluate(engine, seen)
    optimizers = {name: optimizer_of(model, name, folder) for name in case.tasks}
    fails_here = case.odd and engine.processes.rank == engine.processes.world_size - 1

    def update(step: int, losses: Mapping[str, torch.Tensor], norms: Mapping[str, torch.Tensor]) -> list[str]:
        for name in sorted(set(losses) - set(seen.failures)):
            loss, norm = losses[name].item(), norms[name].item()
            seen.losses.setdefault(name, []).append(loss)
            seen.norms.setdefault(name, []).append(norm)
            reason = non_finite_reason(loss, norm)
            if fails_here and name == ODD:
                reason = "the optimizer failed"
            if reason is not None:
                seen.failures[name] = reason
            elif optimizers[name] is not None:
                optimizers[name].step(norms[name])  # type: ignore[union-attr]
        if case.poison and step == 0 and POISONED in losses:
            poison(model)
        return list(seen.failures)

    if case.window:
        executor.sync.exchange_holdings(list(optimizers))
        works = [engine.work(step, list(optimizers)) for step in range(case.num_steps)]
        results = executor.run_window(works, update)  # type: ignore[attr-defined]
        for name in optimizers.keys() - seen.failures.keys():
            assert [one.losses[name].item() for one in results] == seen.losses[name]
    for step in range(0 if case.window else case.num_steps):
        if case.arrives and step == 1:
            engine.register(LATE, folder)
            optimizers[LATE] = optimizer_of(model, LATE, folder)
        names = [name for name in optimizers if name not in seen.failures]
        result = executor.run(engine.work(step, names))
        update(step, result.losses, _norms(model, names) if result.norms is None else result.norms)
    seen.non_finite = executor.non_finite_tasks(engine.work(case.num_steps, list(optimizers)).micro_batches)
    seen.most_in_flight = getattr(executor, "most_in_flight", 0)
    seen.held_bytes = model.stream.key_values.num_bytes
    seen.states = engine.states(optimizers)
    engine.close()
    return seen


def _norms(model: MultiTaskPeftModel, names: Sequence[str]) -> dict[str, torch.Tensor]:
    own = {name: [one.grad for one in model.task_parameters(name).values() if one.grad is not None] for name in names}
    return {name: torch.nn.utils.get_total_norm(gradients) for name, gradients in own.items()}


@torch.no_grad()
def _evaluate(engine: Engine, seen: Seen) -> None:
    """Look at forward passes and generation."""
    case, model, executor = engine.case, engine.model.eval(), engine.executor
    losses = executor.forward_sums(engine.work(case.num_steps, case.tasks).micro_batches).losses
    seen.evaluated = {name: loss.item() for name, loss in losses.items()}
    if case.tasks == FIRST:
        logits = executor.sequence_logits(step_work(0, case.tasks).micro_batches[0])
        seen.logits = None if logits is None else [one.float().numpy() for one in logits]
        if engine.layout.replicas[engine.place.replica].pp * case.num_chunks == 1:
            view, ids = model.task_view("a"), torch.tensor([[5, 17, 3, 60], [9, 2, 41, 8]])
            seen.generated = view.generate(input_ids=ids, max_new_tokens=4, do_sample=False, pad_token_id=0).tolist()
    model.train()


def run_cases(rank: int, cases: Mapping[str, Case], folder: Path) -> bytes:
    """Train cases as one process; what was seen is pickled, as tensors would be handed on in memory that ends."""
    processes, seen = connected(120.0), {}
    for name, case in cases.items():
        seen[name] = train(case, folder, processes)
        gc.collect()
    return pickle.dumps(seen)
