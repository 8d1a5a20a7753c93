"""Passes that cannot be captured run eagerly and say why; inputs of those that can; what is asked of CUDA.

What is captured and replayed through the kernels is in `test_replays.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.data.batch import MuxBatch
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.errors import ConfigError
from peft_mux.modeling.adapters.lora.layer import MultiplexedLinear
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.parallel import cuda_graphs as captured
from peft_mux.parallel.cuda_graphs import MAX_PASSES, CapturedPasses, CudaGraph, Shape
from peft_mux.scheduler.costs.latency import graph_size
from tests.invariants import mux_lab

SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


# --------------------------------------------------------- reasons of the model


class NoGraph:
    """Must not be asked for anything."""


def llama(kind: Any = LlamaForCausalLM, **settings: Any) -> Any:
    torch.manual_seed(0)
    return kind(LlamaConfig(vocab_size=32, **{**SIZES, **settings}))


def gpt2(**settings: Any) -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, **settings))


def mux(backbone: Any, **settings: Any) -> MultiTaskPeftModel:
    config = LoraConfig(**{"r": 4, "target_modules": "all-linear", **settings})
    return MultiTaskPeftModel(backbone, {"a": config}, verify=False).train()


def batch(*lengths: int, task: str = "a") -> MuxBatch:
    rows = [{"task": task, "input_ids": [(3 * n + i) % 32 for i in range(n)]} for n in lengths]
    return ChunkPackingCollator()(rows)


def said(passes: CapturedPasses, *batches: MuxBatch) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for one in batches:
            assert passes.run(one) is None
    return [str(warning.message) for warning in caught]


MODELS = {
    "a classifier takes the loss": lambda: mux(
        llama(LlamaForSequenceClassification, pad_token_id=0), task_type="SEQ_CLS"
    ),
    "a task adapts the output head": lambda: mux(llama(), target_modules=["q_proj", "lm_head"]),
    "a task adapts embeddings (model.embed_tokens)": lambda: mux(llama(), target_modules=["embed_tokens"]),
    "the backbone's own dropout (transformer.drop) draws": lambda: mux(gpt2(attn_pdrop=0.0)),
}


@pytest.mark.parametrize("reason", MODELS)
def test_a_model_that_cannot_be_captured_says_why_once(reason: str) -> None:
    passes = CapturedPasses(MODELS[reason](), nullcontext, NoGraph)  # type: ignore[arg-type]
    messages = said(passes, batch(5), batch(9, 2))
    assert len(messages) == 1
    assert messages[0].startswith(f"passes run eagerly instead of as CUDA graphs, as {reason}")


def test_passes_whose_rows_share_tokens_run_eagerly_and_say_why_once_and_others_are_captured() -> None:
    passes = CapturedPasses(mux(llama()), nullcontext, NoGraph)  # type: ignore[arg-type]
    plain = batch(8, 8)
    shared = plain.sharing([True], 4)
    assert shared.num_computed < plain.num_computed
    assert said(passes, shared, shared) == [
        "passes run eagerly instead of as CUDA graphs, as rows with a common prefix share tokens, different "
        "ones in each step."
    ]
    assert passes._reason_against(plain) is None, "a refused pass refuses no other"


def test_dropout_of_the_backbone_is_no_reason_out_of_training() -> None:
    model = mux(gpt2())
    assert captured.reason_against(model) is not None
    assert captured.reason_against(model.eval()) is None


@pytest.mark.parametrize("is_adapted", [True, False])
def test_quantised_layers_are_a_reason_adapted_or_not(is_adapted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = mux(llama(), target_modules=["q_proj"])
    assert captured.reason_against(model) is None
    if is_adapted:
        monkeypatch.setattr(MultiplexedLinear, "is_plain", property(lambda self: False))
        where = "q_proj"
    else:
        odd = model.backbone.model.layers[0].mlp.up_proj
        monkeypatch.setattr(captured, "bits_of", lambda module: 4 if module is odd else None)
        where = "up_proj"
    reason = captured.reason_against(model)
    assert reason is not None
    assert reason.startswith("layers are quantised")
    assert where in reason


def test_a_micro_batch_that_is_on_the_device_already_is_not_read_back() -> None:
    passes = CapturedPasses(mux(llama()), nullcontext, NoGraph)  # type: ignore[arg-type]
    (message,) = said(passes, batch(5).to("meta"))
    assert "did not come from the host" in message


def test_an_interrupted_capture_is_not_taken_for_a_reason() -> None:
    class Interrupted(NoGraph):
        def warm_up(self, run: Any) -> None:
            raise KeyboardInterrupt

    model = mux(llama())
    model.registry.slab_of("a").bind_gradients()
    for page in model.registry.slab_of("a").pages:
        page.values.grad.fill_(3.0)
    with pytest.raises(KeyboardInterrupt):
        CapturedPasses(model, nullcontext, Interrupted).run(batch(5))  # type: ignore[arg-type]
    assert all(bool((page.values.grad == 3.0).all()) for page in model.registry.slab_of("a").pages)


# ----------------------------------------------------------------- the argument


def test_cuda_graphs_on_a_cpu_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'args\.cuda_graphs must be "auto" or False.*got True'):
        MultiTaskTrainingArguments(output_dir=str(tmp_path), use_cpu=True, cuda_graphs=True)


def test_the_argument_reaches_the_passes_of_a_run(tmp_path: Path) -> None:
    trainer = mux_lab.make_trainer([mux_lab.small_task("a", data_seed=1, max_steps=2)], tmp_path)
    trainer.args.cuda_graphs = True  # as on a machine that has them
    with pytest.warns(UserWarning, match="passes run eagerly instead of as CUDA graphs, as there are none on a cpu"):
        trainer.train()


# --------------------------------------------------------------------- inputs


@pytest.mark.parametrize(
    ("lengths", "shape"),
    [
        ((1,), Shape(64, 2, 16, 64)),
        ((5, 9, 4, 4), Shape(64, 8, 32, 64)),
        ((300,), Shape(320, 2, 320, 512)),
        ((513, 500), Shape(1024, 4, 1024, 1024)),
        # There is always a token of padding.
        ((511,), Shape(512, 2, 512, 512)),
        ((512,), Shape(576, 2, 512, 512)),
        # Steps of 256, and padding of up to four rows: short, so that all rows of the second pass are.
        ((5000,), Shape(5120, 8, 5120, 8192)),
        ((50,) * 100, Shape(5120, 128, 5120, 64)),
    ],
)
def test_sizes_are_rounded_up_so_that_few_shapes_occur(lengths: tuple[int, ...], shape: Shape) -> None:
    assert Shape.of(batch(*lengths)) == shape
    assert graph_size(np.array(sum(lengths))) == shape.num_tokens


@pytest.mark.parametrize(
    ("num_rows", "most_padding", "most_graphs"), [(32, 0.035, 12), (64, 0.022, 13), (256, 0.018, 9)]
)
def test_few_tokens_of_lognormal_rows_are_padding_and_few_graphs_are_captured(
    num_rows: int, most_padding: float, most_graphs: int
) -> None:
    rng = np.random.default_rng(0)
    steps = [np.clip(rng.lognormal(3.2, 0.6, num_rows), 4, 256).astype(int).tolist() for _ in range(200)]
    shapes = [Shape.of(batch(*lengths)) for lengths in steps]
    padded = 1 - sum(map(sum, steps)) / sum(shape.num_tokens for shape in shapes)
    # What else differs is widened to the greatest that came.
    assert (0 < padded <= most_padding, len({shape.num_tokens for shape in shapes}) <= most_graphs) == (True, True)


class _Counted:
    """Stands for a captured pass."""

    def replay(self, batch: MuxBatch) -> torch.Tensor:
        return torch.zeros(len(batch.task_names))


@pytest.mark.parametrize(
    ("num_rows", "most_captures", "least_replayed"),
    [((38, 38), 10, 0.9), ((76, 76), 12, 0.85), ((4, 80), 32, 0.5), ((200, 200), 0, 0.0)],
)
def test_auto_captures_short_passes_whose_shape_recurs_and_never_replaces_a_graph(
    num_rows: tuple[int, int], most_captures: int, least_replayed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures: list[Any] = []
    monkeypatch.setattr(CapturedPasses, "_reason_against", lambda passes, batch: None)
    monkeypatch.setattr(CapturedPasses, "_capture", lambda passes, *key: captures.append(key) or _Counted())
    passes = CapturedPasses(mux(llama()), nullcontext, NoGraph, is_auto=True)  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    num_replayed = 0
    for _ in range(300):
        rows = np.clip(rng.lognormal(3.2, 0.6, rng.integers(num_rows[0], num_rows[1] + 1)), 4, 256).astype(int)
        num_replayed += passes.run(batch(*rows.tolist())) is not None
    print(f"{num_rows[0]} to {num_rows[1]} rows: {len(captures)} captures, {num_replayed / 300:.0%} of passes replayed")
    assert (len(captures) <= most_captures, num_replayed / 300 >= least_replayed) == (True, True)
    assert len(passes._passes) == len(captures) <= MAX_PASSES


def test_at_most_a_fifth_of_many_targets_is_padding() -> None:
    for count in range(200, 3000, 37):
        capacity = Shape.of(batch(count + 1)).num_targets
        assert count <= capacity <= count * 1.26


# ----------------------------------------------------------------- CUDA's calls


class FakeCuda:
    """Notes what is asked of torch.cuda, where there is none."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
        patch.setattr(torch.cuda, "Stream", lambda device: self._stream("side"))
        patch.setattr(torch.cuda, "current_stream", lambda device: self._stream("current"))
        patch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: self.events.append("replay")))
        patch.setattr(torch.cuda, "stream", self._on)
        patch.setattr(torch.cuda, "graph", self._graph)

    def _stream(self, name: str) -> Any:
        return SimpleNamespace(
            name=name, device="gpu", wait_stream=lambda other: self.events.append(f"{name} waits for {other.name}")
        )

    @contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        self.events.append(f"on {stream.name}")
        yield
        self.events.append(f"off {stream.name}")

    @contextmanager
    def _graph(self, graph: Any, *, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        self.events.append(f"capture in {pool} on {stream.name}, {capture_error_mode}")
        yield
        self.events.append("captured")

    def run(self) -> None:
        self.events.append("run")


def test_a_graph_warms_up_and_captures_on_one_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    graph = CudaGraph("pool", torch.cuda.Stream(torch.device("cuda")))
    graph.warm_up(cuda.run)
    assert cuda.events == ["side waits for current", "on side", "run", "run", "off side", "current waits for side"]
    cuda.events.clear()
    graph.capture(cuda.run)
    graph.replay()
    assert cuda.events == [
        "on side", "capture in pool on side, thread_local", "run", "captured", "off side", "replay",
    ]  # fmt: skip
