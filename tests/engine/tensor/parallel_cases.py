"""Shards of real processes, and the same tasks in one process as a reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from peft import LoraConfig
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from peft_mux.data.batch import MuxBatch, chains_of
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.task_batch import TaskBatch, TokenSequence
from peft_mux.engine.executor import Executor
from peft_mux.engine.layout import ParallelLayout
from peft_mux.engine.pipeline.executor import PipelineExecutor
from peft_mux.engine.pipeline.plan import PipelinePlan
from peft_mux.engine.pipeline.stage import StageLayout, StageModel
from peft_mux.engine.processes import Processes
from peft_mux.engine.tensor.parallel import TensorLinks, TensorParallelModel
from peft_mux.engine.work import StepResult, StepWork
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.sharding import Piece
from tests.engine.pipeline import stage_cases
from tests.engine.pipeline.stage_cases import wake
from tests.engine.processes.cases import connected

NUM_LAYERS, HIDDEN, VOCABULARY = 3, 32, stage_cases.VOCABULARY
LATE_CONFIG = LoraConfig(r=5, target_modules="all-linear", lora_dropout=0.1, init_lora_weights="gaussian")


@dataclass(frozen=True)
class ShardCase:
    """One thing to train.

    Attributes:
        shape: of the backbone.
        recomputes: whether activations are checkpointed.
        poison: whether a weight of one task becomes NaN before the second step.
        with_head: whether one task adapts the output head.
        drops_attention: whether attention weights are dropped out.
    """

    shape: str
    recomputes: bool = False
    poison: bool = False
    with_head: bool = False
    drops_attention: bool = False


CASES = {
    "llama": ShardCase("llama"),
    "llama-recomputed": ShardCase("llama", recomputes=True, with_head=True),
    "llama-poisoned": ShardCase("llama", poison=True),
    "qwen": ShardCase("qwen"),
    "qwen-head": ShardCase("qwen", with_head=True),
    "gpt2": ShardCase("gpt2"),
    "gpt2-dropped": ShardCase("gpt2", recomputes=True, drops_attention=True),
}
"""Qwen3 and GPT-2 tie their heads; GPT-2 drops out in its residual stream."""


# ------------------------------------------------------------------ the tasks


def backbone(shape: str, **changed: Any) -> Any:
    """Return a tiny random model in fp32, with 4 heads and an odd vocabulary."""
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": NUM_LAYERS}
    sizes |= {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4}
    torch.manual_seed(3)
    if shape == "llama":
        return LlamaForCausalLM(LlamaConfig(**{**sizes, "attention_bias": True, "mlp_bias": True, **changed}))
    if shape == "qwen":
        more = {"tie_word_embeddings": True, "head_dim": 16, "num_key_value_heads": 2}
        return Qwen3ForCausalLM(Qwen3Config(**{**sizes, **more, **changed}))
    own = {"vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_layer": NUM_LAYERS, "n_head": 4, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(**{**own, "attn_pdrop": 0.0, **changed}))
    with torch.no_grad():  # its biases begin at zero, where a wrong one would not show
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.1)
    return model


def adapters(case: ShardCase) -> dict[str, LoraConfig]:
    """Return five adapters of other ranks, targets and dropouts."""
    attention, mlp, ends = ["q_proj", "v_proj"], ["gate_proj", "down_proj"], ["embed_tokens", "o_proj"]
    if case.shape == "gpt2":
        attention, mlp, ends = ["c_attn"], ["c_fc", "mlp.c_proj"], ["wte", "attn.c_proj"]
    head = ["lm_head"] if case.with_head else []
    common: dict[str, Any] = {"init_lora_weights": "gaussian"}
    return {
        "a": LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.1, **common),
        "b": LoraConfig(r=4, target_modules=attention, layers_to_transform=[0, 2], **common),
        "c": LoraConfig(r=2, target_modules=[*attention, *mlp], lora_dropout=0.2, use_rslora=True, **common),
        "d": LoraConfig(r=16, target_modules=[*mlp, *head], **common),
        "e": LoraConfig(r=6, target_modules=[*ends, *head], **common),
    }


def mux_model(case: ShardCase, configs: dict[str, LoraConfig] | None = None) -> MultiTaskPeftModel:
    """Return the whole model, in training mode; B is not zero, so that all gradients count."""
    configs = configs or adapters(case)
    seeds = {name: index for index, name in enumerate(configs)}
    field = "attn_pdrop" if case.shape == "gpt2" else "attention_dropout"
    changed = {field: 0.1} if case.drops_attention else {}
    model = MultiTaskPeftModel(backbone(case.shape, **changed), configs, seeds=seeds, verify=False)
    for name in model.tasks:
        wake(model.task_parameters(name))
    if case.recomputes:
        model.activation_checkpointing_enable()
    return model.train()


def one_batch(tasks: Sequence[str] = tuple(stage_cases.LENGTHS)) -> MuxBatch:
    """Return the first micro-batch of the first step."""
    return stage_cases.step_work(0, tasks).micro_batches[0]


# ---------------------------------------------------------------- the shards


@torch.no_grad()
def gathered(part: torch.Tensor, piece: Piece, links: TensorLinks) -> torch.Tensor:
    """Return a whole gradient: every shard writes its piece, unless another one has it already."""
    whole = torch.zeros(piece.shape, dtype=part.dtype)
    if piece.adds:
        piece.put(whole, part)
    links.all_reduce(whole).wait()
    return whole


@torch.no_grad()
def whole_weights(model: MultiTaskPeftModel, links: TensorLinks) -> dict[str, dict[str, np.ndarray]]:
    """Return every task's weights as one process has them; what several shards hold whole must be the same bits."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for name in model.tasks:
        own = found.setdefault(name, {})
        pieces = model.registry.pieces_of(name)
        for key, parameter in model.task_parameters(name).items():
            piece = pieces[key]
            total = torch.zeros(piece.shape)
            piece.put(total, parameter.detach())
            if piece.is_whole:
                mine = total.clone()
                links.all_reduce(total).wait()
                total /= links.size
                assert torch.equal(total, mine) or not mine.isfinite().all(), f"shards differ in {key}"
            else:
                links.all_reduce(total).wait()
            own[key] = total.numpy()
    return found


@torch.no_grad()
def sync(model: MultiTaskPeftModel, tasks: Sequence[str], links: TensorLinks) -> None:
    """Add the gradients of all shards up: the plain way, one parameter after another."""
    for name in tasks:
        pieces = model.registry.pieces_of(name)
        for key, parameter in model.task_parameters(name).items():
            if parameter.grad is not None:
                parameter.grad.copy_(pieces[key].take(gathered(parameter.grad, pieces[key], links)))


@torch.no_grad()
def norms(model: MultiTaskPeftModel, tasks: Sequence[str], links: TensorLinks) -> dict[str, torch.Tensor]:
    """Return the norm of each task's whole gradient over the processes of the run, after `sync`."""
    squares = torch.zeros(len(tasks), dtype=torch.float64)
    for index, name in enumerate(tasks):
        pieces = model.registry.pieces_of(name)
        for key, parameter in model.task_parameters(name).items():
            if links.index == 0 or not pieces[key].is_whole:
                squares[index] += parameter.grad.double().square().sum()  # type: ignore[union-attr]
    dist.all_reduce(squares)
    return dict(zip(tasks, squares.sqrt().float().unbind(), strict=True))


class Sharded:
    """An executor whose model is one shard."""

    def __init__(self, executor: Any, model: MultiTaskPeftModel, links: TensorLinks) -> None:
        self._executor, self.model, self._links = executor, model, links

    def run(self, work: StepWork) -> StepResult:
        result = self._executor.run(work)
        sync(self.model, work.tasks, self._links)
        return result

    def gradient_norms(self, tasks: list[str]) -> dict[str, torch.Tensor]:
        return norms(self.model, tasks, self._links)


@dataclass
class Shown:
    """What a process saw of a case.

    Attributes:
        seen: losses and norms of each task by step.
        weights: final ones, whole.
        frozen_bytes: of the weights in this process.
    """

    seen: stage_cases.Seen
    weights: dict[str, dict[str, np.ndarray]]
    frozen_bytes: int


def train_shards(rank: int, names: Sequence[str], folder: Path) -> dict[str, Any]:
    """Train cases as one of two shards, and look at other things."""
    links = TensorLinks([(0, 1)], connected())
    return {**_train_shards(names, links, folder), "facts": facts(links)}


def train_four(rank: int, names: Sequence[str], staged: Sequence[str], folder: Path) -> dict[str, dict[str, Shown]]:
    """Train cases as one of four shards, and others as one of two shards of one of two stages."""
    processes = connected()
    of_four = _train_shards(names, TensorLinks([range(4)], processes), folder)
    return {"tp4": of_four, "tp2xpp2": _train_stages(staged, processes, folder)}


def fail_in_a_pass(rank: int) -> None:
    """Run a pass as one of two shards; shard 1 fails at its third sum, long before any time limit."""
    processes = connected()
    links = TensorLinks([(0, 1)], processes)
    model = mux_model(ShardCase("llama"))
    TensorParallelModel(model, links)
    if rank == 1:
        model.backbone.model.layers[1].mlp.register_forward_hook(_break)
    with processes.together():
        model(one_batch()).losses.sum().backward()


def _break(*arguments: Any) -> None:
    raise RuntimeError("a kernel has failed")


def _train_shards(names: Sequence[str], links: TensorLinks, folder: Path) -> dict[str, Shown]:
    found = {}
    for name in names:
        model = mux_model(CASES[name])
        TensorParallelModel(model, links)
        executor = Executor(model)
        found[name] = _train(CASES[name], executor, model, links, folder)
    return found


def _train_stages(names: Sequence[str], processes: Processes, folder: Path) -> dict[str, Shown]:
    layout = ParallelLayout.of(4, tp=2, pp=2)
    links = TensorLinks(layout.tensor_groups, processes)
    found = {}
    for name in names:
        model = mux_model(CASES[name])
        stage = StageModel(model, StageLayout.of(NUM_LAYERS, 2), layout.place(processes.rank).stage)
        TensorParallelModel(stage.model, links)
        template = stage_cases.template_of(stage_cases.Case("llama", "mux"), 2)
        plan = PipelinePlan(template, stage_cases.HTASKS, stage_cases.BUCKETS)
        executor = PipelineExecutor(stage, plan, processes, pipelines=layout.pipelines)
        found[name] = _train(CASES[name], executor, model, links, folder)
        executor.links.close()
    return found


def _train(case: ShardCase, executor: Any, model: MultiTaskPeftModel, links: TensorLinks, folder: Path) -> Shown:
    optimizers = {name: stage_cases.optimizer_of(model, name, folder) for name in model.tasks}
    sharded = Sharded(executor, model, links)
    seen = stage_cases.train(sharded, model, optimizers, steps=range(stage_cases.NUM_STEPS), poisons=case.poison)
    return Shown(seen, whole_weights(model, links), frozen_bytes(model))


def train_alone(case: ShardCase, folder: Path) -> Shown:
    """Train a case in one process."""
    model = mux_model(case)
    optimizers = {name: stage_cases.optimizer_of(model, name, folder) for name in model.tasks}
    alone = stage_cases.Alone(model)
    seen = stage_cases.train(alone, model, optimizers, steps=range(stage_cases.NUM_STEPS), poisons=case.poison)
    weights = {
        name: {key: parameter.detach().numpy().copy() for key, parameter in model.task_parameters(name).items()}
        for name in model.tasks
    }
    return Shown(seen, weights, frozen_bytes(model))


def frozen_bytes(model: MultiTaskPeftModel) -> int:
    """Return the memory behind the frozen weights, each storage once."""
    own = {id(item) for name in model.tasks for item in model.task_parameters(name).values()}
    storages = [item.untyped_storage() for item in model.parameters() if id(item) not in own]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


# ------------------------------------------------------------------ other facts


def facts(links: TensorLinks) -> dict[str, Any]:
    """Return what shards show outside of training."""
    return {
        "bytes": {name: _bytes_of_a_pass(name, links) for name in ("llama", "llama-recomputed")},
        "logits": {"qwen": _logits("qwen", links)},
        "late": _late_task(links),
        "chains": {shape: _dropped_chain(shape, links) for shape in ("gpt2", "qwen")},
        "generated": {shape: _generated(shape, links) for shape in ("qwen", "gpt2")},
        "classifiers": _classifiers(links),
        "views": _words_are_views(links),
    }


def _bytes_of_a_pass(name: str, links: TensorLinks) -> dict[str, int]:
    """Return what was sent while a model was cut, and in one pass of tasks that adapt no head."""
    model = mux_model(CASES[name])
    links.num_bytes = 0
    TensorParallelModel(model, links)
    while_cutting, batch = links.num_bytes, one_batch(("a", "b"))
    whole_head = mux_model(replace(CASES[name], with_head=False))
    TensorParallelModel(whole_head, links)
    links.num_bytes = 0
    whole_head(batch).losses.sum().backward()
    return {"cutting": while_cutting, "pass": links.num_bytes}


def _logits(shape: str, links: TensorLinks) -> float:
    """Return by how much logits of sequences differ from those of one process."""
    batch = one_batch()
    expected = mux_model(ShardCase(shape)).eval().sequence_logits(batch)
    model = mux_model(ShardCase(shape)).eval()
    TensorParallelModel(model, links)
    pairs = zip(model.sequence_logits(batch), expected, strict=True)
    return max((one - other).abs().max().item() for one, other in pairs)


def _late_task(links: TensorLinks) -> dict[str, float]:
    """Return how a pass differs from one process's after a task arrives that adapts layers which no other task
    adapts."""
    case = ShardCase("llama")
    configs = {"b": LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="gaussian")}
    whole, model = mux_model(case, configs), mux_model(case, configs)
    whole.register_tasks({"a": LATE_CONFIG}, seeds={"a": 5})
    wake(whole.task_parameters("a"))
    shards = TensorParallelModel(model, links)
    model.register_tasks({"a": LATE_CONFIG}, seeds={"a": 6})
    shards.register_pieces(["a"])
    shards.model.registry.place_whole("a", whole.task_parameters("a"))
    return _gaps(whole.train(), model.train(), one_batch(("a", "b")), links)


def _dropped_chain(shape: str, links: TensorLinks) -> dict[str, float]:
    """Return how passes over the parts of long sequences differ from one process's, with attention dropout."""
    case = ShardCase(shape, drops_attention=True)
    batches = [stage_cases.random_batch(name, 0, lengths) for name, lengths in (("a", (37, 5)), ("b", (9, 44)))]
    split = ChunkPackingCollator(chunk_size=8, split_long_sequences=True)
    passes = tuple(split.micro_batches(batches, max_tokens=16))
    assert max(len(chain) for chain in chains_of(passes)) > 2
    work = StepWork(("a", "b"), passes, {batch.task: batch.num_tokens for batch in batches})
    whole, model, plain = mux_model(case), mux_model(case), mux_model(ShardCase(shape))
    TensorParallelModel(model, links)
    losses = [torch.stack(list(Executor(one).run(work).losses.values())) for one in (whole, model, plain)]
    own, other = (
        torch.cat([item.grad.flatten() for item in one.task_parameters("a").values()]) for one in (whole, plain)
    )
    assert (own - other).norm() > 0.1 * own.norm(), "dropout shows"
    return _gaps_of(whole, model, losses[:2], work.tasks, links)


@torch.no_grad()
def _generated(shape: str, links: TensorLinks) -> dict[str, Any]:
    """Return the tokens that one process and shards generate with a task's adapter, and how their logits differ."""
    whole, model = (mux_model(ShardCase(shape)).eval() for _ in range(2))
    TensorParallelModel(model, links)
    input_ids = torch.tensor([[5, 17, 3, 60], [9, 2, 41, 8]])
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    tokens = [one.task_view("a").generate(input_ids=input_ids, **options).tolist() for one in (whole, model)]
    logits = [one.task_view("a")(input_ids=input_ids).logits for one in (whole, model)]
    return {"expected": tokens[0], "found": tokens[1], "gap": (logits[0] - logits[1]).abs().max().item()}


def _classifiers(links: TensorLinks) -> dict[str, float]:
    """Return how a pass of two classifiers differs from one process's."""
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": 2}
    sizes |= {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    options: dict[str, Any] = {"task_type": "SEQ_CLS", "init_lora_weights": "gaussian"}
    configs = {
        "a": LoraConfig(r=3, target_modules="all-linear", lora_dropout=0.1, **options),
        "b": LoraConfig(r=2, target_modules=["down_proj"], **options),
    }
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        model = LlamaForSequenceClassification(LlamaConfig(**sizes, num_labels=3, pad_token_id=0))
        models.append(MultiTaskPeftModel(model, configs, verify=False).train())
    for model in models:
        for name in model.tasks:
            wake(model.task_parameters(name))
    TensorParallelModel(models[1], links)
    rows = tuple(TokenSequence(np.arange(1, 9 + row), np.full(8 + row, -100), row, row % 3) for row in range(4))
    batches = [TaskBatch(name, 0, seed=1, sequences=rows) for name in configs]
    return _gaps(models[0], models[1], ChunkPackingCollator().micro_batches(batches, max_tokens=200)[0], links)


def _gaps(
    whole: MultiTaskPeftModel, model: MultiTaskPeftModel, batch: MuxBatch, links: TensorLinks
) -> dict[str, float]:
    """Return how losses and gradients of a pass through a shard differ from those of one process, relatively."""
    losses = [one(batch).losses for one in (whole, model)]
    for one in losses:
        one.sum().backward()
    return _gaps_of(whole, model, losses, batch.task_names, links)


def _gaps_of(
    whole: MultiTaskPeftModel,
    model: MultiTaskPeftModel,
    losses: list[torch.Tensor],
    tasks: Sequence[str],
    links: TensorLinks,
) -> dict[str, float]:
    """The same after both have run: losses `[N]` of one process and of the shard, gradients in the parameters."""
    sync(model, tasks, links)
    gap, size = 0.0, 0.0
    for name in tasks:
        pieces = model.registry.pieces_of(name)
        for key, parameter in model.task_parameters(name).items():
            expected = pieces[key].take(whole.task_parameters(name)[key].grad)  # type: ignore[arg-type]
            gap = max(gap, (parameter.grad - expected).abs().max().item())  # type: ignore[operator]
            size = max(size, expected.abs().max().item())
    return {"loss": (losses[0] / losses[1] - 1).abs().max().item(), "gradient": gap / size}


def _words_are_views(links: TensorLinks) -> dict[str, bool]:
    """Return whether the head shares its memory with the embedding, tied and untied."""
    found = {}
    for shape in ("llama", "qwen"):
        model = mux_model(ShardCase(shape))
        TensorParallelModel(model, links)
        embedding: Any = model.backbone.get_input_embeddings()
        storages = [weight.untyped_storage().data_ptr() for weight in (embedding.weight, model.backbone.lm_head.weight)]
        found[shape] = storages[0] == storages[1]
    return found
