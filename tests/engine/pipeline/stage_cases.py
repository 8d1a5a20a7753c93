"""Pipelines of real processes, and the same tasks in one process as a reference.

`run_launches` starts the processes of each launch. Each of them is one stage, runs the items of the launch, and leaves
what it saw in the launch's folder.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
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
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.checkpoint.task_state import TaskState, gather_task, join_state, split_state
from peft_mux.data.batch import MuxBatch
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.task_batch import TaskBatch, TokenSequence
from peft_mux.engine.executor import Executor
from peft_mux.engine.gradients import GradientSync
from peft_mux.engine.layout import ParallelLayout
from peft_mux.engine.pipeline.executor import PipelineExecutor
from peft_mux.engine.pipeline.plan import PipelinePlan
from peft_mux.engine.pipeline.stage import StageLayout, StageModel
from peft_mux.engine.pipeline.traffic import Traffic
from peft_mux.engine.processes import Processes
from peft_mux.engine.tasks.optimizer import TaskOptimizer, non_finite_reason
from peft_mux.engine.work import StepResult, StepWork
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.scheduler.pipeline.simulator import simulate
from peft_mux.scheduler.pipeline.template import Action, BucketLoad, PipelineTemplate, build_template
from peft_mux.storage import load_tensors, pack_state, save_tensors, unpack_state
from peft_mux.task import Task, resolve

VOCABULARY, HIDDEN_SIZE, NUM_LAYERS, NUM_STEPS = 97, 32, 8, 3
HTASKS = (("a", "b"), ("c",), ("d", "e"))
BUCKETS = ((0, 1), (2,))
NUM_SLOTS = (4, 3)
LENGTHS = {"a": (3, 9, 17, 5, 21, 8), "b": (12, 4, 30), "c": (7, 7, 6, 19, 2), "d": (25, 3, 11, 14), "e": (5, 40, 9)}
MAX_TOKENS = (30, 15, 40)
POISONED, ODD = "d", "a"


@dataclass(frozen=True)
class Case:
    """One thing to train.

    Attributes:
        shape: of the backbone.
        schedule: of the template.
        num_chunks: virtual stages of a process.
        layers_per_stage: by default equal.
        recomputes: whether activations are checkpointed.
        poison: whether a weight of one task becomes NaN before the second step.
        holds_back: whether memory is limited so that few micro-batches are in flight.
        bf16: whether it runs under autocast.
    """

    shape: str
    schedule: str = "1f1b"
    num_chunks: int = 1
    layers_per_stage: tuple[int, ...] | None = None
    recomputes: bool = False
    poison: bool = False
    holds_back: bool = False
    bf16: bool = False


CASES = {
    "llama-1f1b": Case("llama"),
    "llama-gpipe": Case("llama", "gpipe"),
    "llama-interleaved": Case("llama", "interleaved_1f1b", num_chunks=2),
    "llama-mux": Case("llama", "mux"),
    "llama-mux-chunks": Case("llama", "mux", num_chunks=2),
    "llama-gpipe-waves": Case("llama", "gpipe", holds_back=True),
    "llama-mux-limit": Case("llama", "mux", holds_back=True),
    "llama-recomputed": Case("llama", "mux", recomputes=True),
    "llama-poisoned": Case("llama", "mux", poison=True),
    "llama-bf16": Case("llama", "mux", bf16=True),
    "qwen-mux": Case("qwen", "mux"),
    "qwen-interleaved": Case("qwen", "interleaved_1f1b", num_chunks=2),
    "mistral-uneven": Case("mistral", layers_per_stage=(3, 5)),
    "gpt2-gpipe": Case("gpt2", "gpipe"),
    "gpt2-1f1b": Case("gpt2", "1f1b"),
    "gpt2-mux": Case("gpt2", "mux", recomputes=True),
    "gpt2-interleaved": Case("gpt2", "interleaved_1f1b", num_chunks=2),
}


# ------------------------------------------------------------------ the tasks


def backbone(shape: str) -> Any:
    """Return a tiny random model: hidden 32, 8 layers, fp32."""
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": NUM_LAYERS}
    sizes |= {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(3)
    if shape == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes))
    if shape == "mistral":
        return MistralForCausalLM(MistralConfig(**sizes, sliding_window=8))
    if shape == "qwen":
        more = {"tie_word_embeddings": True, "head_dim": 8, "use_sliding_window": True, "sliding_window": 8}
        return Qwen3ForCausalLM(Qwen3Config(**sizes, **more, max_window_layers=4))
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=NUM_LAYERS, n_head=4, n_positions=64)
    return GPT2LMHeadModel(config)


def adapters(shape: str) -> dict[str, LoraConfig]:
    """Return five unequal adapters: other ranks, targets and dropouts; some without weights on some stages."""
    attention, mlp = ["q_proj", "v_proj"], ["gate_proj", "down_proj"]
    ends = ["embed_tokens", "lm_head", "o_proj"] if shape == "llama" else attention
    if shape == "gpt2":
        attention, mlp, ends = ["c_attn"], ["c_fc", "mlp.c_proj"], ["wte", "c_attn"]
    common: dict[str, Any] = {"init_lora_weights": "gaussian"}
    return {
        "a": LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.1, **common),
        "b": LoraConfig(r=4, target_modules=attention, **common),
        "c": LoraConfig(r=2, target_modules=attention, layers_to_transform=[6, 7], lora_dropout=0.2, **common),
        "d": LoraConfig(r=16, target_modules=mlp, layers_to_transform=[0, 2, 3], **common),
        "e": LoraConfig(r=6, target_modules=ends, lora_dropout=0.0, **common),
    }


def mux_model(case: Case) -> MultiTaskPeftModel:
    """Return the whole model, in training mode; B is not zero, so that all gradients count."""
    seeds = {name: index for index, name in enumerate(LENGTHS)}
    model = MultiTaskPeftModel(backbone(case.shape), adapters(case.shape), seeds=seeds, verify=False)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name in model.tasks:
            for key, parameter in sorted(model.task_parameters(name).items()):
                if "lora_B" in key or "embedding_A" in key:
                    parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    if case.recomputes:
        model.activation_checkpointing_enable()
    return model.train()


def step_work(step: int, tasks: Sequence[str]) -> StepWork:
    """Return the global batches of a step; every process draws the same ones."""
    batches = {name: random_batch(name, step, LENGTHS[name]) for name in tasks}
    micro_batches: list[MuxBatch] = []
    for htask, most in zip(HTASKS, MAX_TOKENS, strict=True):
        fused = [batches[name] for name in htask if name in batches]
        if fused:
            micro_batches += ChunkPackingCollator().micro_batches(fused, max_tokens=most)
    return StepWork(tuple(batches), tuple(micro_batches), {name: one.num_tokens for name, one in batches.items()})


def random_batch(name: str, step: int, lengths: Sequence[int], num_words: int = VOCABULARY) -> TaskBatch:
    """Return random rows of the given lengths."""
    rng = np.random.default_rng([step, ord(name)])
    sequences = []
    for row, length in enumerate(lengths):
        ids = rng.integers(1, num_words, size=length)
        sequences.append(TokenSequence(ids, ids, row))
    return TaskBatch(name, step, seed=ord(name), sequences=tuple(sequences))


@torch.no_grad()
def wake(parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Fill the factors of a task that begin at zero."""
    generator = torch.Generator().manual_seed(11)
    for key, parameter in sorted(parameters.items()):
        if "lora_B" in key or "embedding_A" in key:
            parameter.copy_(0.05 * torch.randn(parameter.shape, generator=generator))


def optimizer_of(model: MultiTaskPeftModel, name: str, folder: Path, **settings: Any) -> TaskOptimizer | None:
    """Return a task's optimizer; none in a process where it has no weights. It clips, and decays."""
    parameters = model.task_parameters(name)
    if not parameters:
        return None
    args = MultiTaskTrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none")
    hyper = {"learning_rate": 1e-2, "weight_decay": 0.01, "max_grad_norm": 0.05, "max_steps": 9, **settings}
    task = Task(name=name, peft_config=LoraConfig(), train_dataset=[{"input_ids": [1, 2]}], **hyper)
    return TaskOptimizer(name, dict(parameters), resolve(task, args), 9, args, model.registry.slab_of(name))


# ------------------------------------------------------------------- training


@dataclass
class Seen:
    """What a run showed.

    Attributes:
        losses: of each task by step.
        norms: likewise, of gradients before clipping.
        failures: why a task ended.
    """

    losses: dict[str, list[float]] = field(default_factory=dict)
    norms: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


class Alone:
    """All in one process: the reference for pipelines."""

    def __init__(self, model: MultiTaskPeftModel, *, bf16: bool = False) -> None:
        self.model, self._executor = model, Executor(model, bf16=bf16)

    def run(self, work: StepWork) -> StepResult:
        return self._executor.run(work)

    def gradient_norms(self, tasks: list[str]) -> dict[str, torch.Tensor]:
        return {
            name: torch.nn.utils.get_total_norm([p.grad for p in self.model.task_parameters(name).values()])
            for name in tasks
        }


def train(
    executor: Any, model: MultiTaskPeftModel, optimizers: dict[str, Any], *, steps: range, poisons: bool = False
) -> Seen:
    """Train as the trainer does: verdicts first, then the steps of those that passed."""
    seen = Seen()
    for step in steps:
        if poisons and step == 1:
            poison(model)
        tasks = [name for name in optimizers if name not in seen.failures]
        result = executor.run(step_work(step, tasks))
        norms = executor.gradient_norms(tasks) if result.norms is None else result.norms
        take_step(replace(result, norms=norms), tasks, optimizers, seen)
    return seen


def take_step(result: StepResult, tasks: Sequence[str], optimizers: Mapping[str, Any], seen: Seen) -> None:
    """Let tasks step by the verdict on their losses and norms, and remember both."""
    assert result.norms is not None, "the caller knows them"
    for name in tasks:
        loss, norm = result.losses[name].item(), result.norms[name].item()
        seen.losses.setdefault(name, []).append(loss)
        seen.norms.setdefault(name, []).append(norm)
        reason = non_finite_reason(loss, norm)
        if reason is not None:
            seen.failures[name] = reason
        elif optimizers[name] is not None:
            optimizers[name].step(result.norms[name])


@torch.no_grad()
def poison(model: MultiTaskPeftModel) -> None:
    """Spoil the weights of one task in one layer."""
    for key, parameter in model.task_parameters(POISONED).items():
        if "layers.2." in key and "lora_A" in key:
            parameter.fill_(float("nan"))


def train_alone(case: Case, folder: Path, num_steps: int = NUM_STEPS) -> tuple[Seen, dict[str, TaskState]]:
    """Return what one process sees, and the state of every task afterwards."""
    model = mux_model(case)
    optimizers = {name: optimizer_of(model, name, folder) for name in model.tasks}
    seen = train(Alone(model, bf16=case.bf16), model, optimizers, steps=range(num_steps), poisons=case.poison)
    states = {name: split_state(model.task_parameters(name), optimizers[name]) for name in model.tasks}
    return seen, states


def template_of(case: Case, num_stages: int) -> PipelineTemplate:
    """Return the case's template over both buckets."""
    loads = loads_of(num_stages, (1000, 700))
    limit = [2600] * num_stages if case.holds_back else None
    template = build_template(
        loads,
        case.schedule,  # type: ignore[arg-type]
        num_chunks=case.num_chunks,
        memory_limit_bytes=limit,
    )
    assert limit is None or max(simulate(template, loads).peak_bytes) <= limit[0]
    return template


def loads_of(num_stages: int, activation_bytes: tuple[int, ...]) -> list[BucketLoad]:
    """Return loads of both buckets, the second one slower."""
    return [
        BucketLoad(
            name=f"bucket {index}",
            forward_s=(1.0 + index,) * num_stages,
            activation_bytes=(size,) * num_stages,
            num_micro_batches=count,
        )
        for index, (size, count) in enumerate(zip(activation_bytes, NUM_SLOTS, strict=True))
    ]


def traffic_of(template: PipelineTemplate, slots: Any, stage: int) -> Traffic:
    """Return the messages of a stage without channels, all of whose gradients go back."""
    links: Any = SimpleNamespace(incoming={}, outgoing={})
    layout = StageLayout.of(NUM_LAYERS, template.num_stages, num_chunks=template.num_chunks)
    model: Any = SimpleNamespace(stage=stage, layout=layout, hidden_size=HIDDEN_SIZE, dtype=torch.float32)
    model.gradient_rows = lambda virtual_stage, batch: None
    return Traffic(links, model, template, slots)


def make_stage(case: Case, processes: Processes, folder: Path) -> tuple[PipelineExecutor, dict[str, Any]]:
    """Return this process's part of a case: its executor and its optimizers."""
    size = processes.world_size
    layout = StageLayout.of(NUM_LAYERS, size, num_chunks=case.num_chunks, layers_per_stage=case.layers_per_stage)
    stage = StageModel(mux_model(case), layout, processes.rank)
    loads = tuple(loads_of(size, (1000, 700)))
    plan = PipelinePlan(template_of(case, size), HTASKS, BUCKETS, loads)
    sync = GradientSync(stage.model, processes, ParallelLayout.of(size, pp=size))
    executor = PipelineExecutor(stage, plan, processes, bf16=case.bf16, sync=sync)
    optimizers = {name: optimizer_of(stage.model, name, folder) for name in stage.model.tasks}
    return executor, optimizers


def train_stage(name: str, processes: Processes, folder: Path) -> None:
    """Train a case as one stage, and write what was seen; rank 0 also writes whole states."""
    case = CASES[name]
    executor, optimizers = make_stage(case, processes, folder)
    model = executor.model
    seen = train(executor, model, optimizers, steps=range(NUM_STEPS), poisons=case.poison)
    facts = {
        "losses": seen.losses,
        "norms": seen.norms,
        "failures": seen.failures,
        "most_in_flight": executor.most_in_flight,
        "ran": [str(span.action) for span in executor.spans],
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    facts["non_finite"] = executor.non_finite_tasks(step_work(NUM_STEPS, model.tasks).micro_batches)
    (folder / f"{name}-{processes.rank}.json").write_text(json.dumps(facts))
    write_whole_states(name, executor, optimizers, processes, folder)
    executor.links.close()


def train_window(name: str, processes: Processes, folder: Path) -> None:
    """Train a case as one stage in a window of all its steps, and write what was seen, as `train_stage` does.

    With "+odd" behind the name, the first update of one task fails on the last stage alone.
    """
    case_name, _, odd = name.partition("+")
    case, fails_here = CASES[case_name], bool(odd) and processes.rank == processes.world_size - 1
    executor, optimizers = make_stage(case, processes, folder)
    model, seen = executor.model, Seen()
    executor.sync.exchange_holdings(list(optimizers))

    def update(step: int, losses: Mapping[str, torch.Tensor], norms: Mapping[str, torch.Tensor]) -> list[str]:
        for task in set(losses) - set(seen.failures):
            loss, norm = losses[task].item(), norms[task].item()
            seen.losses.setdefault(task, []).append(loss)
            seen.norms.setdefault(task, []).append(norm)
            reason = non_finite_reason(loss, norm)
            if fails_here and task == ODD:
                reason = "the optimizer failed"
            if reason is not None:
                seen.failures[task] = reason
            elif optimizers[task] is not None:
                optimizers[task].step(norms[task])
        if case.poison and step == 0 and POISONED in losses:
            poison(model)
        return list(seen.failures)

    results = executor.run_window([step_work(step, list(optimizers)) for step in range(NUM_STEPS)], update)
    facts = {
        "losses": seen.losses,
        "norms": seen.norms,
        "failures": seen.failures,
        "results": [{task: loss.item() for task, loss in one.losses.items()} for one in results],
        "ran": [str(span.action) for span in executor.spans],
        "most_in_flight": executor.most_in_flight,
    }
    (folder / f"window-{name}-{processes.rank}.json").write_text(json.dumps(facts))
    write_whole_states(f"window-{name}", executor, optimizers, processes, folder)
    executor.links.close()


def write_whole_states(
    name: str, executor: PipelineExecutor, optimizers: dict[str, Any], processes: Processes, folder: Path
) -> None:
    """Write the states of all tasks on rank 0, which every stage sends its part of."""
    layout, model = ParallelLayout.of(processes.world_size, pp=processes.world_size), executor.model
    for task in model.tasks:
        own = split_state(model.task_parameters(task), optimizers[task])
        whole = gather_task(processes, layout, model.registry.pieces_of(task), own)
        if whole is not None:
            write_state(whole, folder / f"{name}-{task}")


def write_state(state: TaskState, path: Path) -> None:
    """Write a state as two files."""
    fields = {"weights": state.weights, "moments": state.moments}
    tensors, tree = pack_state({**fields, "settings": state.settings, "schedule": state.schedule})
    save_tensors(path.with_suffix(".safetensors"), tensors)
    path.with_suffix(".json").write_text(json.dumps(tree))


def read_state(path: Path) -> TaskState:
    """Read what `write_state` wrote."""
    tensors = load_tensors(path.with_suffix(".safetensors"))
    return TaskState(**unpack_state(tensors, json.loads(path.with_suffix(".json").read_text())))


# -------------------------------------------------------------- other commands


class SavedBytes:
    """Counts what autograd holds for backward passes."""

    def __init__(self) -> None:
        self.held = self.peak = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is saved within the `with` block, until it is freed."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved.tensor):
            yield

    def _pack(self, tensor: torch.Tensor) -> Any:
        return _Saved(tensor, self)


class _Saved:
    def __init__(self, tensor: torch.Tensor, counter: SavedBytes) -> None:
        self.tensor, self._counter, self._bytes = tensor.detach(), counter, tensor.numel() * tensor.element_size()
        counter.held += self._bytes
        counter.peak = max(counter.peak, counter.held)

    def __del__(self) -> None:
        self._counter.held -= self._bytes


def memory(name: str, processes: Processes, folder: Path) -> None:
    """Compare the bytes held after each action with what the template allows, by the bytes of each micro-batch."""
    case = CASES[name]
    executor, _ = make_stage(case, processes, folder)
    saved, rows, sizes = SavedBytes(), [], {}

    def watch(action: Action) -> None:
        before = rows[-1][1] if rows else 0
        rows.append((str(action), saved.held))
        if action.kind == "F":
            sizes[action.bucket, action.micro_batch, action.chunk] = saved.held - before

    executor.on_action = watch
    work = step_work(0, list(LENGTHS))
    with saved.counting():
        executor.run(work)
    expected, held = [], 0
    for action in executor.plan.template.actions[processes.rank]:
        size = sizes[action.bucket, action.micro_batch, action.chunk]
        held += size if action.kind == "F" else -size
        expected.append((str(action), held))
    facts = {"held": rows, "expected": expected, "peak": saved.peak, "most_in_flight": executor.most_in_flight}
    (folder / f"memory-{name}-{processes.rank}.json").write_text(json.dumps(facts))
    executor.links.close()


def resume(name: str, processes: Processes, folder: Path) -> None:
    """Continue for one step from the states in the folder, whatever layout wrote them."""
    executor, optimizers = make_stage(CASES[name], processes, folder)
    model = executor.model
    for task in model.tasks:
        join_state(read_state(folder / f"start-{task}"), model.task_parameters(task), optimizers[task])
    seen = train(executor, model, optimizers, steps=range(NUM_STEPS - 1, NUM_STEPS))
    (folder / f"resume-{name}-{processes.rank}.json").write_text(json.dumps({"losses": seen.losses}))
    executor.links.close()


def fall(name: str, processes: Processes, folder: Path) -> None:
    """Let the last stage die, fail or hang in its third action; the others write which error they got, and when."""
    case_name, _, how = name.partition("+")
    executor, _ = make_stage(CASES[case_name], processes, folder)
    ran: list[Action] = []

    def strike(action: Action) -> None:
        ran.append(action)
        if len(ran) == 3 and processes.rank == processes.world_size - 1:
            if how == "dies":
                os._exit(7)
            if how == "hangs":
                time.sleep(600)
            raise RuntimeError("a kernel has failed")

    executor.on_action = strike
    started = time.monotonic()
    try:
        with processes.together():
            executor.run(step_work(0, list(LENGTHS)))
        error = "none"
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    facts = {"error": error, "seconds": time.monotonic() - started}
    (folder / f"{how}-{processes.rank}.json").write_text(json.dumps(facts))
    os._exit(0)


COMMANDS: dict[str, Callable[[str, Processes, Path], None]] = {
    "train": train_stage,
    "window": train_window,
    "memory": memory,
    "resume": resume,
    "fall": fall,
}


def run_rank(rank: int, launch: Launch, port: int) -> None:
    """Be one process of a launch."""
    with (launch.folder / f"output-{rank}.txt").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=launch.world,
        timeout=timedelta(seconds=60),
    )
    processes = Processes(rank, launch.world, timeout_s=launch.timeout_s)
    processes.connect()
    for item in launch.items:
        command, _, name = item.partition(":")
        COMMANDS[command](name, processes, launch.folder)
        gc.collect()
    dist.destroy_process_group()


@dataclass
class Launch:
    """Some processes that run the same items.

    Attributes:
        world: how many.
        folder: for what they leave.
        items: as `command:case`.
        timeout_s: how long one waits for another.
        falls: whether the last one may fail; it is ended once all others are done.
    """

    world: int
    folder: Path
    items: list[str]
    timeout_s: float = 60.0
    falls: bool = False
    ranks: list[int] = field(default_factory=list)

    def start(self) -> None:
        """Fork: one import of torch and transformers serves them all."""
        self.folder.mkdir(exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(self.world):
            child = os.fork()
            if child == 0:
                self._be(rank, port)
            self.ranks.append(child)

    def _be(self, rank: int, port: int) -> None:
        code = 1
        try:
            run_rank(rank, self, port)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def wait(self) -> None:
        """Wait, and write the exit codes of those that may not fail."""
        survivors = self.ranks[: -1 if self.falls else None]
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in survivors]
        for child in set(self.ranks) - set(survivors):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        (self.folder / "codes.json").write_text(json.dumps(codes))


def run_launches(groups: list[list[dict[str, Any]]]) -> None:
    """Run groups of launches, those of a group at the same time."""
    torch.set_num_threads(1)
    for group in groups:
        launches = [Launch(**{**fields, "folder": Path(fields["folder"])}) for fields in group]
        for launch in launches:
            launch.start()
        for launch in launches:
            launch.wait()
