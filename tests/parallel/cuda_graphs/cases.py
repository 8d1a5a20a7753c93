"""Captured passes compared with eager ones, through the kernels in Triton's interpreter.

A stand-in takes the place of CUDA graphs: it notes which operations the captured call made, with the shapes and numbers
that they were handed, and replays by making the call again, which must make the same ones over the same memory.

Run with TRITON_INTERPRET=1, in a process of its own: `python tests/parallel/cuda_graphs/cases.py [case ...]`. It prints
as JSON how each case failed, or an empty text.
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from peft import LoraConfig
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from peft_mux.data.batch import MuxBatch
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.task_batch import TaskBatch, TokenSequence
from peft_mux.engine.executor import Executor
from peft_mux.engine.work import StepWork
from peft_mux.kernels.lora.launch import Launch
from peft_mux.modeling.adapters.lora import lora_pass
from peft_mux.modeling.attention import packed as attention
from peft_mux.modeling.attention import varlen
from peft_mux.modeling.attention.varlen import as_kernel
from peft_mux.modeling.backbone.recompute import recompute_inputs
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.parallel import cuda_graphs
from peft_mux.parallel.cuda_graphs import CapturedPasses
from tests.kernels.interpreter import keep_patches

VOCABULARY = 64
LIMIT = 1e-6
TARGETS = {
    "a": ["q_proj", "k_proj", "v_proj"],
    "b": ["q_proj", "down_proj"],
    "c": ["k_proj", "up_proj"],
    "d": ["o_proj"],
}
CONFIGS = {
    name: LoraConfig(r=rank, target_modules=TARGETS[name], lora_dropout=dropout, init_lora_weights=False)
    for name, rank, dropout in (("a", 8, 0.0), ("b", 4, 0.0), ("c", 20, 0.3), ("d", 4, 0.5))
}
Lengths = dict[str, tuple[int, ...]]


# ------------------------------------------------------------------ stand-ins


class Watch(TorchDispatchMode):
    """Notes operations, and what else launches name, while it is not paused."""

    active: Watch | None = None
    paused = False

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[str] = []

    def __enter__(self) -> Watch:
        Watch.active = self
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        Watch.active = None
        super().__exit__(*args)

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if not Watch.paused:
            self.launches.append(f"{function}{_described([*args, *(kwargs or {}).values()])}")
        return function(*args, **(kwargs or {}))


def _described(arguments: Any) -> list[Any]:
    """Return shapes, and the numbers that would be written into a graph."""
    described = []
    for item in arguments:
        if isinstance(item, torch.Tensor):
            described.append(list(item.shape))
        elif isinstance(item, (list, tuple)):
            described.append(_described(item))
        elif item is None or isinstance(item, (int, float, str, torch.dtype)):
            described.append(item)
    return described


def watched_launch(launch: Callable[..., None]) -> Callable[..., None]:
    def noted(self: Any, grid: Any, moving: Any, tables: Any, **options: Any) -> None:
        if Watch.active is not None:
            arguments = (*moving, *tables, *self._fixed)
            addresses = [item.data_ptr() for item in arguments if isinstance(item, torch.Tensor) and item.dim() == 1]
            Watch.active.launches.append(f"{self._kernel.__name__}{grid}{addresses}{_described(arguments)}")
        with unwatched():
            launch(self, grid, moving, tables, **options)

    return noted


@contextmanager
def unwatched() -> Iterator[None]:
    """Count everything inside as one kernel."""
    before, Watch.paused = Watch.paused, True
    try:
        yield
    finally:
        Watch.paused = before


class Recorded:
    """Stands for a CUDA graph."""

    alive: weakref.WeakSet[Recorded] = weakref.WeakSet()

    def __init__(self) -> None:
        Recorded.alive.add(self)

    def warm_up(self, run: Callable[[], None]) -> None:
        run()

    def capture(self, run: Callable[[], None]) -> None:
        self.run = run
        with Watch() as watch:
            run()
        self.launches = watch.launches

    def replay(self) -> None:
        with Watch() as watch:
            self.run()
        assert len(self.launches) > 50
        for captured_one, one in itertools.zip_longest(self.launches, watch.launches):
            assert captured_one == one, f"captured {captured_one}, but now {one}"


class Silent(Recorded):
    """Computes nothing when it is replayed."""

    def replay(self) -> None:
        pass


class Failing(Recorded):
    """Cannot be captured."""

    def capture(self, run: Callable[[], None]) -> None:
        run()
        raise RuntimeError("operation not permitted when stream is capturing")


class _Attention(torch.autograd.Function):
    """Attention sequence by sequence, as one operation."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, bounds: Any, scale: float) -> Any:
        ctx.save_for_backward(q, k, v, bounds)
        ctx.scale = scale
        with unwatched():
            return _by_sequence(q, k, v, bounds.tolist(), scale)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        *qkv, bounds = ctx.saved_tensors
        with unwatched(), torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in qkv]
            out = _by_sequence(*leaves, bounds.tolist(), ctx.scale)
            return (*torch.autograd.grad(out, leaves, grads[0]), None, None)


def _by_sequence(q: Any, k: Any, v: Any, bounds: list[int], scale: float) -> torch.Tensor:
    parts = []
    for start, end in itertools.pairwise(bounds):
        heads_first = (x[start:end].transpose(0, 1) for x in (q, k, v))
        if end > start:
            out = F.scaled_dot_product_attention(*heads_first, is_causal=True, scale=scale, enable_gqa=True)
            parts.append(out.transpose(0, 1))
    return torch.cat(parts)


def varlen_stand_in(
    q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: int, max_k: int,
    *, scale: float, window_size: Any, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    assert window_size == (-1, 0)
    with unwatched():
        assert max_q >= int(cu_q.diff().max()), "the launch would be too small"
        assert int(cu_q[-1]) == len(q), "some tokens are of no sequence"
    return _Attention.apply(q, k, v, cu_q, scale)


# --------------------------------------------------------------------- inputs


def batch(lengths: Lengths, *, step: int = 0, offset: int = 0) -> MuxBatch:
    """Return a micro-batch; `step` sets the draws of dropout, `offset` the tokens."""
    batches = []
    for name, own in lengths.items():
        generator = torch.Generator().manual_seed(1000 * ord(name) + 10 * step + offset)
        rows = [torch.randint(0, VOCABULARY, (length,), generator=generator).numpy() for length in own]
        sequences = tuple(TokenSequence(row, row, index) for index, row in enumerate(rows))
        batches.append(TaskBatch(name, step, ord(name), sequences))
    (made,) = ChunkPackingCollator().micro_batches(batches, max_tokens=100_000)
    return made


def model_of(*tasks: str, dtype: torch.dtype = torch.float32) -> MultiTaskPeftModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    backbone = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=1, **sizes))  # type: ignore[arg-type]
    configs = {name: CONFIGS[name] for name in tasks}
    return MultiTaskPeftModel(backbone.to(dtype), configs, verify=False).train()


class Pair:
    """The same model twice: one runs eagerly, the other one through captured passes."""

    def __init__(self, *tasks: str, make_graph: Callable[[], Any] = Recorded, bf16: bool = False) -> None:
        dtype = torch.bfloat16 if bf16 else torch.float32
        self.executors = [Executor(model_of(*tasks, dtype=dtype), bf16=bf16) for _ in range(2)]
        self.models = [executor.model for executor in self.executors]
        replaying = self.executors[1]
        self.captured = replaying.runner = CapturedPasses(replaying.model, replaying.precision, make_graph)

    def step(self, *batches: MuxBatch, limit: float = LIMIT) -> int:
        """Assert that both have the same losses and gradients, then update; return how many passes were captured."""
        tasks = tuple(dict.fromkeys(name for one in batches for name in one.task_names))
        eager, replayed = (
            executor.run(StepWork(tasks, batches, dict.fromkeys(tasks, 1))) for executor in self.executors
        )
        for name in tasks:
            mine, theirs = (gradients(model, name) for model in self.models)
            for key, one, other in [
                ("loss", eager.losses[name], replayed.losses[name]),
                *((key, mine[key], theirs[key]) for key in mine),
            ]:
                assert difference(one, other) <= limit, f"{name} {key}: {difference(one, other)}"
        for model in self.models:
            for page in pages_of(model, *model.tasks):
                if page.values.grad is not None:
                    page.values.data.sub_(page.values.grad, alpha=0.05)
                    page.values.grad.zero_()
        return self.captured.num_captures


def pages_of(model: MultiTaskPeftModel, *tasks: str) -> list[Any]:
    return [page for name in tasks for page in model.registry.slab_of(name).pages]


def gradients(model: MultiTaskPeftModel, task: str) -> dict[str, torch.Tensor]:
    return {key: p.grad.clone() for key, p in model.task_parameters(task).items() if p.grad is not None}


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return by how much two tensors differ at most, relative to the greatest number in the first."""
    scale = max(float(one.abs().max()), 1e-3)
    return float((one - other).abs().max()) / scale


# ---------------------------------------------------------------------- cases


def steps_are_those_of_eager_passes_with_each_shape_captured_once() -> None:
    """Steps with other lengths, draws and weights each time; then an evaluation, and another step."""
    pair = Pair("a", "c")
    steps = [
        [batch({"a": (5, 3), "c": (4, 2)}), batch({"a": (7, 2), "c": (2, 4)}, offset=5)],
        [batch({"a": (4, 1), "c": (3, 5)}, step=1)],
        [batch({"a": (20, 3), "c": (8, 1)}, step=2), batch({"c": (5, 6), "a": (6, 1)}, step=2)],
        [batch({"a": (1, 1), "c": (11, 2)}, step=3), batch({"c": (9, 1), "a": (5, 1)}, step=3)],
    ]
    assert [pair.step(*step) for step in steps] == [1, 1, 3, 3]
    for executor in pair.executors:
        executor.model.eval()
        assert executor.non_finite_tasks(steps[0]) == []
        executor.model.train()
    assert pair.step(*steps[1]) == 3, "an evaluation captures nothing"


def a_replay_draws_by_the_seed_and_the_step_of_its_own_micro_batch() -> None:
    model = model_of("c")
    passes, first = CapturedPasses(model, nullcontext, Recorded), batch({"c": (5, 9)})
    drawn = []
    for change in ({}, {"task_steps": (1,)}, {"task_seeds": (7,)}, {}):
        passes.run(replace(first, **change))
        drawn.append(gradients(model, "c"))
        for page in pages_of(model, "c"):
            page.values.grad.zero_()
    another_step, another_seed, again = (
        max(difference(drawn[0][key], other[key]) for key in other) for other in drawn[1:]
    )
    assert min(another_step, another_seed) > 0.1
    assert again == 0.0


def what_a_graph_holds_is_captured_again_when_it_changes_and_the_old_graph_is_freed() -> None:
    pair = Pair("a", "b")
    small = {"a": (5, 4), "b": (3,)}

    def look(lengths: Lengths, step: int, num_captures: int) -> None:
        assert pair.step(batch(lengths, step=step)) == num_captures
        gc.collect()
        assert len(Recorded.alive) == 1

    look(small, 0, 1)
    look(small, 1, 1)
    for model in pair.models:
        model.register_tasks({"d": CONFIGS["d"]})
    look({**small, "d": (6,)}, 2, 2)
    look(small, 3, 2)
    for model in pair.models:
        model.remove_tasks(["b"])
    look({"a": (5, 4), "d": (6,)}, 4, 3)
    for model in pair.models:
        model.registry.slab_of("a").drop_gradients()
    look({"a": (5, 4), "d": (6,)}, 5, 4)
    for model in pair.models:
        model.to(torch.float32)
        model._apply(lambda tensor: tensor.clone())
    look({"a": (5, 4), "d": (6,)}, 6, 5)


def graphs_beyond_the_limit_are_freed_and_captured_again() -> None:
    before, cuda_graphs.MAX_PASSES = cuda_graphs.MAX_PASSES, 1
    gc.collect()
    alive = len(Recorded.alive)
    pair = Pair("d")
    for length, num_captures in ((5, 1), (40, 2), (5, 3), (6, 3)):
        pair.captured.run(batch({"d": (length,)}))
        gc.collect()
        assert (pair.captured.num_captures, len(Recorded.alive) - alive) == (num_captures, 1)
    cuda_graphs.MAX_PASSES = before


def a_poisoned_task_leaves_every_bit_of_the_others_alone_and_capturing_it_leaves_nothing_behind() -> None:
    results = []
    for value in (None, float("nan"), float("inf")):
        model = model_of("a", "b", "c")
        passes = CapturedPasses(model, nullcontext, Recorded)
        passes.run(batch({"a": (5, 9), "b": (3,), "c": (4, 2)}))
        if value is not None:
            model.registry.slab_of("b").pages[0].values.data.fill_(value)
        losses = passes.run(batch({"a": (3, 8), "b": (6,), "c": (7,)}, step=1))
        assert losses is not None
        assert passes.num_captures == 1
        results.append((losses, {name: gradients(model, name) for name in "abc"}))
    healthy = results.pop(0)
    for losses, grads in results:
        assert losses.isfinite().tolist() == [True, False, True]
        assert torch.equal(losses[[0, 2]], healthy[0][[0, 2]])
        assert all(torch.equal(grads[task][key], healthy[1][task][key]) for task in "ac" for key in grads[task])
        assert not all(bool(grad.isfinite().all()) for grad in grads["b"].values())
    # The micro-batch that is captured may be poisoned itself.
    model = model_of("a", "b")
    model.registry.slab_of("b").pages[0].values.data.fill_(float("nan"))
    CapturedPasses(model, nullcontext, Recorded).run(batch({"a": (5,), "b": (3,)}))
    assert all(bool(grad.isfinite().all()) for grad in gradients(model, "a").values())


def no_amount_of_padding_changes_anything() -> None:
    """From one token of padding to all but one, at the size of the package and at a small one."""
    small = cuda_graphs.TOKEN_STEP
    for step, lengths in ((small, (1, 15, 31, 32)), (256, (255,))):
        cuda_graphs.TOKEN_STEP = step
        pair = Pair("c")
        for length in lengths:
            assert cuda_graphs.Shape.of(batch({"c": (length,)})).num_tokens == (length // step + 1) * step
            pair.step(batch({"c": (length,)}))
    cuda_graphs.TOKEN_STEP = small


def capturing_leaves_gradients_and_weights_as_they_were() -> None:
    pair = Pair("a", "c", make_graph=Silent)
    model = pair.models[1]
    for name in model.tasks:
        model.registry.slab_of(name).bind_gradients()
    for page in pages_of(model, *model.tasks):
        page.values.grad.normal_()
    before = [(page.values.clone(), page.values.grad.clone()) for page in pages_of(model, *model.tasks)]
    pair.captured.run(batch({"a": (5,), "c": (9,)}))
    assert pair.captured.num_captures == 1
    for page, (values, grad) in zip(pages_of(model, *model.tasks), before, strict=True):
        assert torch.equal(page.values, values)
        assert torch.equal(page.values.grad, grad)


def activations_that_are_recomputed_are_captured() -> None:
    pair = Pair("a", "c")
    for model in pair.models:
        model.activation_checkpointing_enable()
    assert pair.step(batch({"a": (5,), "c": (9,)})) == 1
    assert pair.step(batch({"a": (7,), "c": (2,)}, step=1)) == 1


def inputs_that_are_recomputed_are_captured() -> None:
    pair = Pair("a", "c")
    recompute_inputs(pair.captured._model.backbone)
    assert pair.step(batch({"a": (5,), "c": (9,)})) == 1
    assert pair.step(batch({"a": (7,), "c": (2,)}, step=1)) == 1


def a_replay_in_bf16_sees_the_weights_of_now() -> None:
    """Kernels read copies of the weights in bf16, which every replay brings up to date."""
    pair = Pair("a", bf16=True)
    assert [pair.step(batch({"a": (5, 3)}, step=step)) for step in range(2)] == [1, 1]


def a_pass_that_turns_out_not_to_be_capturable_runs_eagerly_and_says_why_once() -> None:
    def look(pair: Pair, reason: str) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step, lengths in enumerate(({"a": (5,), "b": (3,)}, {"a": (60,), "b": (2,)})):
                assert pair.step(batch(lengths, step=step), limit=0.0) == 0
        (said,) = [str(one.message) for one in caught if "eagerly" in str(one.message)]
        assert reason in said, said

    look(Pair("a", "b", make_graph=Failing), "capturing failed with RuntimeError: operation not permitted")
    pair = Pair("a", "b")
    for model in pair.models:
        weight = next(p for key, p in model.task_parameters("a").items() if "k_proj.lora_A" in key)
        weight.register_hook(lambda gradient: gradient)
    look(pair, "kernels do not serve the adapters of model.layers.0.self_attn.q_proj")
    support, attention.varlen_support = attention.varlen_support, lambda *args, **kwargs: "no reason"
    look(Pair("a", "b"), "attention is computed by groups of sequences of equal length")
    attention.varlen_support = support
    runs, lora_pass.runs_kernels = lora_pass.runs_kernels, lambda device: False
    look(Pair("a", "b"), "adapters are not computed by kernels")
    lora_pass.runs_kernels = runs


CASES = {
    case.__name__: case
    for case in (
        steps_are_those_of_eager_passes_with_each_shape_captured_once,
        a_replay_draws_by_the_seed_and_the_step_of_its_own_micro_batch,
        what_a_graph_holds_is_captured_again_when_it_changes_and_the_old_graph_is_freed,
        graphs_beyond_the_limit_are_freed_and_captured_again,
        a_poisoned_task_leaves_every_bit_of_the_others_alone_and_capturing_it_leaves_nothing_behind,
        no_amount_of_padding_changes_anything,
        capturing_leaves_gradients_and_weights_as_they_were,
        activations_that_are_recomputed_are_captured,
        inputs_that_are_recomputed_are_captured,
        a_replay_in_bf16_sees_the_weights_of_now,
        a_pass_that_turns_out_not_to_be_capturable_runs_eagerly_and_says_why_once,
    )
}


def failure_of(case: Callable[[], None]) -> str:
    try:
        case()
    except Exception:
        return traceback.format_exc()
    return ""


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    keep_patches()
    # A pass may run eagerly only in cases that expect it: its results would be correct but prove nothing.
    warnings.filterwarnings("error", message="passes run eagerly")
    cuda_graphs.TOKEN_STEP = 32  # the interpreter takes its time for every row
    lora_pass.runs_kernels = lambda device: True
    attention.varlen_support = lambda *args, **kwargs: None
    attention.runs_kernels = lambda device: True
    kernel = as_kernel("torch", varlen_stand_in)
    varlen.varlen_kernel = lambda: kernel  # type: ignore[assignment]
    Launch.__call__ = watched_launch(Launch.__call__)  # type: ignore[method-assign]
    print(json.dumps({name: failure_of(CASES[name]) for name in names or CASES}))


if __name__ == "__main__":
    main(sys.argv[1:])
