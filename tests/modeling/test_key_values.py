"""Parts of long sequences: losses and gradients are those of the unsplit ones, whatever other tasks are in the pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig

from peft_mux.data.batch import MuxBatch, chains_of
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.task_batch import TaskBatch, TokenSequence
from peft_mux.engine.executor import Executor
from peft_mux.engine.work import StepWork
from peft_mux.errors import UnsupportedModelError
from peft_mux.modeling.model import MultiTaskPeftModel
from tests.modeling.adapters.passes import gradients_of, moved
from tests.modeling.attention.kernel_cases import one_call
from tests.modeling.backbones import VOCABULARY, backbone_of, classifier_of

BOUND, CHUNK, WINDOW = 32, 16, 11
# Whole chunks, one token more, three chunks less one, and short ones.
LENGTHS = {"a": (96, 5, 21, 9), "b": (97, 33, 7), "c": (12, 30, 3, 17)}
Result = tuple[dict[str, float], dict[str, torch.Tensor]]


SIZES = {"num_hidden_layers": 3, "max_position_embeddings": 128}
BACKBONES = {
    "llama": backbone_of("llama", **SIZES),
    "mistral": backbone_of("mistral", **SIZES, sliding_window=WINDOW),
    "gpt2": backbone_of("gpt2", **SIZES, attn_pdrop=0.2, resid_pdrop=0.2, embd_pdrop=0.2),
}


def mux_model(shape: str = "llama", *, recomputes: bool = False) -> MultiTaskPeftModel:
    """Return three unequal adapters that all count, two of them with dropout."""
    attention, mlp = ["q_proj", "k_proj", "v_proj"], ["gate_proj", "down_proj"]
    if shape == "gpt2":
        attention, mlp = ["c_attn"], ["c_fc", "mlp.c_proj"]
    configs = {
        "a": LoraConfig(r=8, target_modules="all-linear", lora_dropout=0.1),
        "b": LoraConfig(r=4, target_modules=attention, lora_dropout=0.2),
        "c": LoraConfig(r=2, target_modules=mlp, layers_to_transform=[1, 2]),
    }
    torch.manual_seed(5)
    model = moved(MultiTaskPeftModel(BACKBONES[shape](), configs, verify=False))
    if recomputes:
        model.activation_checkpointing_enable()
    return model.train()


def task_batch(name: str, lengths: Sequence[int], *, step: int = 2) -> TaskBatch:
    rng = np.random.default_rng([len(lengths), *name.encode()])
    rows = [rng.integers(1, VOCABULARY, length) for length in lengths]
    return TaskBatch(name, step, 9, tuple(TokenSequence(ids, ids, row) for row, ids in enumerate(rows)))


def step_work(lengths: dict[str, tuple[int, ...]], *, is_split: bool, bound: int = BOUND) -> StepWork:
    """Return the passes of a step; unsplit sequences get passes of their own, however long."""
    batches = [task_batch(name, rows) for name, rows in lengths.items()]
    collator = ChunkPackingCollator(chunk_size=CHUNK, split_long_sequences=is_split)
    micro_batches = collator.micro_batches(batches, max_tokens=bound)
    if is_split:
        assert all(micro_batch.num_tokens <= bound for micro_batch in micro_batches)
    tokens = {batch.task: batch.num_tokens for batch in batches}
    return StepWork(tuple(lengths), tuple(micro_batches), tokens)


def run(model: MultiTaskPeftModel, work: StepWork, *, bf16: bool = False) -> Result:
    losses = Executor(model, bf16=bf16).run(work).losses
    return {name: loss.item() for name, loss in losses.items()}, gradients_of(model)


@cache
def unsplit(shape: str) -> Result:
    return run(mux_model(shape), step_work(LENGTHS, is_split=False))


def check_equal(found: Result, wanted: Result, rel: float) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=rel)
    assert found[1].keys() == wanted[1].keys()
    for key, gradient in wanted[1].items():
        assert gradient.norm() > 0, "a gradient of zero shows nothing"
        assert (found[1][key] - gradient).norm() <= rel * gradient.norm(), key


def check_as_near(found: Result, whole: Result, exact: Result) -> None:
    """Assert that a split step is as near to the exact one as an unsplit step is, for each task."""
    assert found[0] == pytest.approx(exact[0], rel=1e-2)
    for name in exact[0]:
        own = {key: gradient for key, gradient in exact[1].items() if key.startswith(f"{name} ")}
        errors = [sum((one[1][key].cpu() - g).norm() ** 2 for key, g in own.items()) for one in (found, whole)]
        assert 0 < errors[0] <= 1.5 * errors[1], name


# ---------------------------------------------------------------- split = unsplit


@pytest.mark.parametrize(
    ("shape", "recomputes"), [("llama", False), ("mistral", True), pytest.param("gpt2", True, marks=pytest.mark.slow)]
)
def test_losses_and_gradients_of_split_sequences_are_those_of_unsplit_ones(shape: str, recomputes: bool) -> None:
    split = step_work(LENGTHS, is_split=True)
    assert [len(chain) for chain in chains_of(split.micro_batches)][:3] == [3, 4, 2]
    assert any(len(micro_batch.task_names) > 1 for micro_batch in split.micro_batches if micro_batch.parts)
    model = mux_model(shape, recomputes=recomputes)
    check_equal(run(model, split), unsplit(shape), 1e-5)
    assert model.stream.key_values.num_bytes == 0


@pytest.mark.parametrize("bound", [7, pytest.param(40, marks=pytest.mark.slow)])
def test_any_bound_gives_the_same_step(bound: int) -> None:
    split = step_work(LENGTHS, is_split=True, bound=bound)
    check_equal(run(mux_model("mistral"), split), unsplit("mistral"), 1e-5)


@pytest.mark.parametrize("length", [4 * CHUNK, 4 * CHUNK + 1, 4 * CHUNK - 1])
def test_whole_chunks_and_one_token_more_or_less(length: int) -> None:
    lengths = {"b": (length,)}
    split, whole = step_work(lengths, is_split=True), step_work(lengths, is_split=False)
    assert len(split.micro_batches) == -(-length // BOUND)
    check_equal(run(mux_model(), split), run(mux_model(), whole), 1e-5)


@pytest.mark.slow
def test_under_bfloat16_a_split_step_is_as_near_to_float32_as_an_unsplit_one() -> None:
    exact, whole = unsplit("llama"), run(mux_model(), step_work(LENGTHS, is_split=False), bf16=True)
    found = run(mux_model(), step_work(LENGTHS, is_split=True), bf16=True)
    check_as_near(found, whole, exact)


def test_the_loss_without_gradients_is_the_same_and_leaves_nothing_behind() -> None:
    model = mux_model().eval()
    with torch.no_grad():
        losses = []
        for is_split in (True, False):
            total: dict[str, float] = {}
            for micro_batch in step_work(LENGTHS, is_split=is_split).micro_batches:
                for name, loss in zip(micro_batch.task_names, model(micro_batch).losses.tolist(), strict=True):
                    total[name] = total.get(name, 0.0) + loss
            losses.append(total)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert model.stream.key_values.num_bytes == 0


# ---------------------------------------------------------------- what it rests on


def test_keys_and_values_are_freed_pass_by_pass_in_the_backward() -> None:
    work = step_work({"b": (96,)}, is_split=True)
    model, held = mux_model(), []
    release = model.stream.key_values.release

    def watch(recorded: Any) -> None:
        held.append(model.stream.key_values.num_bytes)
        release(recorded)

    model.stream.key_values.release = watch  # type: ignore[method-assign]
    Executor(model).run(work)
    bytes_of_part = 2 * 3 * 32 * 2 * 8 * 4  # keys and values, layers, tokens, key-value heads, channels, float32
    assert held == [2 * bytes_of_part, 2 * bytes_of_part, bytes_of_part]  # no later part reads the last one
    assert model.stream.key_values.num_bytes == 0


def test_a_step_that_failed_halfway_leaves_nothing_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model, work = mux_model(), step_work(LENGTHS, is_split=True)
    forward, calls = model.forward, []

    def failing(micro_batch: MuxBatch) -> Any:
        calls.append(micro_batch)
        if len(calls) == 3:
            raise MemoryError("of the device")
        return forward(micro_batch)

    monkeypatch.setattr(model, "forward", failing)
    with pytest.raises(MemoryError):
        Executor(model).run(work)
    monkeypatch.undo()
    check_equal(run(model, work), run(mux_model(), work), 0.0)


def test_a_part_outside_a_chain_and_models_in_which_every_token_sees_every_other_are_refused() -> None:
    part = step_work({"b": (64,)}, is_split=True).micro_batches[0]
    with pytest.raises(RuntimeError, match=r'task "b" ran outside a chain'):
        mux_model()(part)
    config = LoraConfig(target_modules=["query"], task_type="SEQ_CLS")
    model = MultiTaskPeftModel(classifier_of("bert")(), {"b": config}, verify=False)
    with pytest.raises(UnsupportedModelError, match="Set split_long_sequences=False"), torch.no_grad():
        model(part)


@pytest.mark.parametrize("shape", [pytest.param("llama", marks=pytest.mark.slow), "mistral"])
def test_a_kernel_for_varying_lengths_gets_the_keys_of_each_part(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work = step_work(LENGTHS, is_split=True)
    wanted = run(mux_model(shape), work)
    calls = one_call(monkeypatch)
    check_equal(run(mux_model(shape), work), wanted, 1e-5)
    before = {"llama": (32, 64), "mistral": (WINDOW - 1, WINDOW - 1)}[shape]
    chain = work.micro_batches[:3]
    assert [micro_batch.parts[0].start for micro_batch in chain] == [0, 32, 64]
    for pass_number, extra in enumerate((0, *before)):
        queries, keys = calls[3 * pass_number][:2]
        assert queries == list(chain[pass_number].sequence_lengths)
        assert keys == [queries[0] + extra, *queries[1:]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("shape", ["llama", "mistral"])
def test_on_a_gpu_parts_give_the_losses_and_gradients_of_unsplit_sequences(shape: str) -> None:
    exact = unsplit(shape)
    on_gpu = [
        run(mux_model(shape).to("cuda"), step_work(LENGTHS, is_split=is_split), bf16=True) for is_split in (True, False)
    ]
    check_as_near(on_gpu[0], on_gpu[1], exact)


# ---------------------------------------------------------------- neighbours


def test_nan_in_one_sequence_stays_in_its_task() -> None:
    """Also where the poisoned sequence is split and its parts are next to others, in several passes."""
    healthy = step_work(LENGTHS, is_split=True)
    clean = run(mux_model(), healthy)
    model = mux_model()
    with torch.no_grad():
        for key, parameter in model.task_parameters("a").items():
            if "layers.1" in key and "k_proj.lora_A" in key:
                parameter.fill_(float("nan"))
    losses, gradients = run(model, healthy)
    assert np.isnan(losses["a"])
    assert (losses["b"], losses["c"]) == (clean[0]["b"], clean[0]["c"])
    for key, gradient in clean[1].items():
        assert key.startswith("a ") or torch.equal(gradients[key], gradient), key


def test_passes_without_parts_take_the_same_path_as_before() -> None:
    lengths = {name: tuple(length for length in rows if length <= BOUND) for name, rows in LENGTHS.items()}
    split, whole = step_work(lengths, is_split=True), step_work(lengths, is_split=False)
    assert all(micro_batch.parts == () for micro_batch in split.micro_batches)
    check_equal(run(mux_model(), split), run(mux_model(), whole), 0.0)
