"""Tiny random models of every family, trained in one process and in layouts of several processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from peft import LoraConfig
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.pytorch_utils import Conv1D

from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.engine.executor import Executor
from peft_mux.engine.fsdp import shard_backbone
from peft_mux.engine.gradients import GradientSync
from peft_mux.engine.layout import ParallelLayout
from peft_mux.engine.pipeline.executor import PipelineExecutor
from peft_mux.engine.pipeline.plan import PipelinePlan
from peft_mux.engine.pipeline.stage import StageLayout, StageModel
from peft_mux.engine.processes import Processes
from peft_mux.engine.tensor.parallel import TensorLinks, TensorParallelModel
from peft_mux.engine.work import StepWork
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.scheduler.pipeline.template import build_template
from tests.engine.pipeline import stage_cases
from tests.engine.processes.cases import connected

VOCABULARY, NUM_LAYERS, NUM_STEPS = 61, 4, 2
LENGTHS = {"a": (5, 19, 9), "b": (23, 3)}

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
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
    **dict.fromkeys(
        (
            "attention_dropout",
            "hidden_dropout",
            "residual_dropout",
            "embd_pdrop",
            "attn_pdrop",
            "resid_pdrop",
            "dropout",
        ),
        0.0,
    ),
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


def config_of(kind: str) -> Any:
    """Return a small configuration of a model type; layers alternate where some of the family's slide."""
    known = CONFIG_MAPPING[kind]().to_dict()
    fields = {**_SIZES, **{name: value for name, value in _WHERE_KNOWN.items() if name in known}, **_MORE.get(kind, {})}
    if "sliding_attention" in (known.get("layer_types") or ()):
        fields["layer_types"] = ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2)
    config = CONFIG_MAPPING[kind](**fields)
    if kind == "gemma2":
        config._attn_implementation = "eager"  # only this path of transformers honours the soft-cap of the scores
    return config


def backbone(kind: str) -> Any:
    """Return a tiny random model whose weights are large enough that every layer matters."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config_of(kind), dtype=torch.float32)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            draws = 0.15 * torch.randn(weight.shape)
            weight.copy_(1.0 + draws if weight.ndim == 1 and name.endswith("weight") else draws)
    return model


def adapters(model: Any) -> dict[str, LoraConfig]:
    """Return two adapters: on all layers, of a mixture on those of attention; and on some of attention."""
    linears = [name for name, module in model.named_modules() if type(module) in (nn.Linear, Conv1D)]
    inner = [name for name in linears if "layers." in name or ".h." in name]
    attention = [name for name in inner if "att" in name]
    mixes = any("experts" in name for name, _ in model.named_parameters())
    few = [name for name in attention if name.rpartition(".")[2] not in ("v_proj", "k_proj")]
    return {
        "a": LoraConfig(r=8, target_modules=attention if mixes else inner, lora_dropout=0.1),
        "b": LoraConfig(r=3, target_modules=few),
    }


def mux_model(kind: str) -> MultiTaskPeftModel:
    """Return the whole model, in training mode; B is not zero, so that all gradients count."""
    whole = backbone(kind)
    model = MultiTaskPeftModel(whole, adapters(whole), seeds={"a": 0, "b": 1}, verify=False)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name in model.tasks:
            for key, parameter in sorted(model.task_parameters(name).items()):
                if "lora_B" in key:
                    parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model.train()


def step_work(step: int, *, has_rows: bool = True) -> StepWork:
    """Return the global batches of a step; every process draws the same ones, those without rows run nothing."""
    batches = [stage_cases.random_batch(name, step, lengths, VOCABULARY) for name, lengths in LENGTHS.items()]
    passes = tuple(ChunkPackingCollator().micro_batches(batches, max_tokens=40))
    return StepWork(tuple(LENGTHS), passes if has_rows else (), {batch.task: batch.num_tokens for batch in batches})


class Seen(NamedTuple):
    """What training showed.

    Attributes:
        losses: of each task by step.
        weights: final ones, whole, by task and name.
    """

    losses: dict[str, list[float]]
    weights: dict[str, dict[str, np.ndarray]]


def train(
    executor: Any,
    model: MultiTaskPeftModel,
    folder: Path,
    sync: GradientSync | None = None,
    *,
    has_rows: bool = True,
) -> Seen:
    """Train as the trainer does, and return what was seen."""
    # Not faster: if a gradient is almost zero, AdamW takes a step from its rounding error.
    optimizers = {name: stage_cases.optimizer_of(model, name, folder, learning_rate=1e-3) for name in model.tasks}
    losses: dict[str, list[float]] = {name: [] for name in model.tasks}
    for step in range(NUM_STEPS):
        result = executor.run(step_work(step, has_rows=has_rows))
        for name, own in losses.items():
            own.append(result.losses[name].item())
            parameters = model.task_parameters(name).values()
            norm = torch.nn.utils.get_total_norm([item.grad for item in parameters if item.grad is not None])
            optimizer = optimizers[name]
            if optimizer is not None:
                optimizer.step(norm if result.norms is None else result.norms[name])
    weights = {
        name: {key: item.detach().numpy().copy() for key, item in model.task_parameters(name).items()}
        if sync is None
        else gather_weights(model, name, sync)
        for name in model.tasks
    }
    return Seen(losses, weights)


def gather_weights(model: MultiTaskPeftModel, name: str, sync: GradientSync) -> dict[str, np.ndarray]:
    """Return the whole weights of a task on every process."""
    pieces = model.registry.pieces_of(name)
    own = {key: (pieces[key], item.detach()) for key, item in model.task_parameters(name).items()}
    whole: dict[str, np.ndarray] = {}
    for part in sync.gather(own):
        for key, (piece, item) in part.items():
            total = torch.from_numpy(whole.setdefault(key, np.full(piece.shape, np.nan, np.float32)))
            piece.put(total, item)
    return whole


# ------------------------------------------------------------------- layouts


def train_alone(kind: str, folder: Path) -> Seen:
    """Train in one process; the model is probed first, as it is before any training."""
    model = mux_model(kind)
    model.verify_once()
    return train(Executor(model), model, folder)


def train_layout(kind: str, layout: ParallelLayout, processes: Processes, links: TensorLinks, folder: Path) -> Seen:
    """Train as one process of a replica of stages, shards, or both."""
    model, place, replica = mux_model(kind), layout.place(processes.rank), layout.replicas[0]
    stage = StageModel(model, StageLayout.of(NUM_LAYERS, replica.pp), place.stage) if replica.pp > 1 else None
    TensorParallelModel(model, links)
    sync = GradientSync(model, processes, layout)
    if stage is None:
        return train(Executor(model, sync=sync), model, folder, sync)
    executor = PipelineExecutor(stage, two_stages(), processes, pipelines=layout.pipelines, sync=sync)
    seen = train(executor, model, folder, sync)
    executor.links.close()
    return seen


def train_sharded(kind: str, processes: Processes, folder: Path) -> Seen:
    """Train with a backbone that is sharded over all processes; the first has all rows."""
    model = mux_model(kind)
    sync = GradientSync(model, processes, is_deferred=True)
    executor = Executor(model, sync=sync, sharded=shard_backbone(model, processes))
    return train(executor, model, folder, has_rows=processes.rank == 0)


def train_sharded_stage(kind: str, layout: ParallelLayout, processes: Processes, folder: Path) -> Seen:
    """Train as one of two stages whose weights are sharded over the replicas; the first replica has all rows."""
    model, place = mux_model(kind), layout.place(processes.rank)
    stage = StageModel(model, StageLayout.of(NUM_LAYERS, layout.replicas[0].pp), place.stage)
    backbone = shard_backbone(model, processes, stage, layout)
    sync = GradientSync(model, processes, layout, is_deferred=True)
    options: dict[str, Any] = {"pipelines": layout.pipelines, "sync": sync, "sharded": backbone}
    executor = PipelineExecutor(stage, two_stages(), processes, **options)
    seen = train(executor, model, folder, sync, has_rows=place.replica == 0)
    executor.links.close()
    return seen


def two_stages() -> PipelinePlan:
    """Return a plan of two stages and one hTask."""
    template = build_template(stage_cases.loads_of(2, (1000, 700))[:1], "mux")
    return PipelinePlan(template, (("a", "b"),), ((0,),))


def conform(rank: int, kinds: Sequence[str], folder: Path) -> dict[str, dict[str, Seen]]:
    """Train every family as one of two stages, as one of two shards, and with half of the frozen weights."""
    processes = connected(120.0)
    pp, tp = ParallelLayout.of(2, pp=2), ParallelLayout.of(2, tp=2)
    alone, both = TensorLinks(pp.tensor_groups, processes), TensorLinks(tp.tensor_groups, processes)
    return {
        kind: {
            "pp": train_layout(kind, pp, processes, alone, folder),
            "tp": train_layout(kind, tp, processes, both, folder),
            "fsdp": train_sharded(kind, processes, folder),
        }
        for kind in kinds
    }


def conform_of_four(rank: int, kinds: Sequence[str], folder: Path) -> dict[str, Seen]:
    """Train every family as one of two shards of one of two stages."""
    processes, layout = connected(120.0), ParallelLayout.of(4, pp=2, tp=2)
    links = TensorLinks(layout.tensor_groups, processes)
    return {kind: train_layout(kind, layout, processes, links, folder) for kind in kinds}


def conform_of_sharded_stages(rank: int, kinds: Sequence[str], folder: Path) -> dict[str, Seen]:
    """Train every family as one of two stages, each of which two replicas hold half of."""
    processes, layout = connected(120.0), ParallelLayout.of(4, pp=2)
    return {kind: train_sharded_stage(kind, layout, processes, folder) for kind in kinds}
