"""The kernels as Triton compiles them for GPUs, run on the CPU: right in bf16, and blind to neighbours.

Triton's interpreter multiplies bf16 wrongly, so bf16 is tested here: the PTX of every launch of a training pass,
next to torch in bf16, both against float64.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig

from peft_mux.data.batch import MuxBatch
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.task_batch import TaskBatch, TokenSequence
from peft_mux.kernels.lora import launch
from peft_mux.kernels.lora.tables import Factors, RankTable, SegmentTables
from peft_mux.modeling.model import MultiTaskPeftModel

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)

from peft_mux.kernels.attention.short_rows import short_row_attention
from peft_mux.kernels.cross_entropy.logits_kernel import cross_entropy_, row_stride
from tests.ptx.device import ptx_on_cpu
from tests.ptx.machine import PtxFault

pytestmark = pytest.mark.timeout(900)

NAN = float("nan")
RANKS = {"narrow": (5, 0.0), "with_dropout": (16, 0.1), "absent": (8, 0.0), "wide": (24, 0.0)}
PRESENT = [name for name in RANKS if name != "absent"]


def small_llama(num_layers: int, dtype: torch.dtype) -> MultiTaskPeftModel:
    """Return a Llama whose weights are bf16 numbers, with a task of each rank."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=num_layers,
        pad_token_id=0,
    )
    backbone = transformers.LlamaForCausalLM(config).to(torch.bfloat16).to(dtype).requires_grad_(False)
    configs = {
        name: LoraConfig(r=rank, lora_dropout=dropout, target_modules="all-linear", init_lora_weights=False)
        for name, (rank, dropout) in RANKS.items()
    }
    seeds = {name: seed for seed, name in enumerate(configs)}
    model = MultiTaskPeftModel(backbone, configs, seeds=seeds, verify=False).train()
    torch.manual_seed(1)
    for name in configs:
        for parameter in model.task_parameters(name).values():
            with torch.no_grad():
                parameter.copy_((0.1 * torch.randn(parameter.shape)).to(torch.bfloat16))
    return model


def ragged_batch() -> MuxBatch:
    """Return rows of unequal length for the tasks that are present."""
    rng = np.random.default_rng(3)
    batches = []
    for name in PRESENT:
        rows = []
        for row, length in enumerate(rng.integers(12, 40, 2)):
            ids = rng.integers(1, 300, length).astype(np.int64)
            rows.append(TokenSequence(ids, ids.copy(), row))
        batches.append(TaskBatch(name, 1, 7, tuple(rows)))
    (batch,) = ChunkPackingCollator().micro_batches(batches, max_tokens=4096)
    return batch


def losses_and_gradients(model: MultiTaskPeftModel) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Return the loss of each task and the gradients of its adapter, in float64."""
    model.stream.clear_tables()
    losses = model(ragged_batch()).losses
    losses.sum().backward()
    gradients = {}
    for name in PRESENT:
        gradients[name] = torch.cat([value.grad.double().flatten() for value in model.task_parameters(name).values()])
        for page in model.registry.slab_of(name).pages:
            page.values.grad.zero_()
    return dict(zip(PRESENT, losses.detach().double().tolist(), strict=True)), gradients


def off_by(found: torch.Tensor, right: torch.Tensor) -> float:
    """Return the relative error in the Frobenius norm."""
    return float((found.double() - right.double()).norm() / right.double().norm())


@pytest.mark.parametrize(
    ("capability", "num_layers", "products"),
    [
        pytest.param(90, 1, "wgmma", marks=pytest.mark.slow),
        pytest.param(80, 1, "mma", marks=pytest.mark.slow),
        pytest.param(90, 2, "wgmma", marks=pytest.mark.nightly),
    ],
)
def test_a_training_pass_in_bf16_is_as_near_to_float64_as_torch_in_bf16(
    capability: int, num_layers: int, products: str
) -> None:
    right_losses, right = losses_and_gradients(small_llama(num_layers, torch.float64))
    model = small_llama(num_layers, torch.bfloat16)
    _, in_torch = losses_and_gradients(model)
    with ptx_on_cpu(capability) as launches:
        losses, in_ptx = losses_and_gradients(model)

    kernels = {"shrink_kernel", "expand_kernel", "wgrad_kernel", "_cross_entropy_kernel"}
    assert set(launches.counts) == kernels
    assert products in launches.opcodes
    for name in PRESENT:
        assert losses[name] == pytest.approx(right_losses[name], rel=1e-3)
        assert off_by(in_ptx[name], right[name]) < max(1.2 * off_by(in_torch[name], right[name]), 5e-3), name
        assert off_by(in_torch[name], right[name]) < 5e-2, "the comparison itself is off"


@pytest.mark.parametrize("task", [1, 2])
@pytest.mark.parametrize("dropout", [0.0, pytest.param(0.1, marks=pytest.mark.slow)])
def test_a_narrow_and_a_wide_task_next_to_nan_neighbours_have_the_bits_that_they_have_alone(
    dropout: float, task: int
) -> None:
    torch.manual_seed(0)
    width, lengths, ranks, seeds = 256, (40, 70, 25), (16, 24, 8), [11, 22, 33]
    rows, rank = (slice(40, 110) if task == 1 else slice(110, 135)), ranks[task]
    x = torch.randn(sum(lengths), width).to(torch.bfloat16)
    factors = [torch.randn(rank, width).to(torch.bfloat16) for rank in ranks]
    beside_nan, nan_first = torch.full_like(x, NAN), [torch.full_like(factors[0], NAN), factors[1], factors[2]]
    beside_nan[rows] = x[rows]

    with ptx_on_cpu(90) as launches:
        alone, gradient_alone = shrink_and_wgrad(
            (lengths[task],), (rank,), x[rows].clone(), [factors[task]], dropout, seeds=[seeds[task]]
        )
        found, gradient = shrink_and_wgrad(lengths, ranks, beside_nan, nan_first, dropout, seeds=seeds)

    assert found[:40, :16].isnan().all(), "neighbours are NaN"
    assert torch.equal(found[rows, :rank], alone[:, :rank])
    assert torch.equal(gradient[task], gradient_alone[0])
    assert launches.counts == {"shrink_kernel": 2, "wgrad_kernel": 2}, "narrow and wide ranks share a launch"


@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dropout", [0.0, pytest.param(0.1, marks=pytest.mark.slow)])
def test_programs_of_sixteen_rows_give_the_bits_of_whole_tiles(capability: int, dropout: float) -> None:
    torch.manual_seed(0)
    lengths, ranks, width = (70, 33), (16, 24), 256
    x = torch.randn(sum(lengths), width).to(torch.bfloat16)
    factors = [torch.randn(rank, width).to(torch.bfloat16) for rank in ranks]
    with ptx_on_cpu(capability) as launches:
        short, whole = (
            shrink_and_wgrad(lengths, ranks, x, factors, dropout, seeds=[1, 2], shrink_rows=rows)[0]
            for rows in (16, 64)
        )
    assert ("wgmma" in launches.opcodes) == (capability == 90)
    assert torch.equal(short, whole)
    assert short[:70, :16].any()


def shrink_and_wgrad(
    lengths: tuple[int, ...],
    ranks: tuple[int, ...],
    x: torch.Tensor,
    factors: list[torch.Tensor],
    dropout: float,
    *,
    seeds: list[int],
    shrink_rows: int = 16,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return `s = x A^T` of all tasks, and `s^T x` of each."""
    tables = SegmentTables(lengths, seeds)
    tables.shrink_rows = shrink_rows
    table = RankTable(ranks, [1.5] * len(ranks), dropouts=[dropout] * len(ranks))
    s = torch.zeros(sum(lengths), 64, dtype=torch.bfloat16)
    gradients = [torch.zeros(rank, x.shape[1]) for rank in ranks]
    places = torch.cat([torch.arange(length) for length in lengths])
    width = x.shape[1]
    launch.shrink(x, Factors(factors, width), s, tables, table, scaled=False, places=places, module_seed=5)
    launch.wgrad(
        s, x, Factors(gradients, width), tables, table, scaled=True, places=places, module_seed=5, accumulate=True
    )
    return s, gradients


def test_weight_gradients_of_long_segments_are_reduced_in_order_onto_those_that_are_there() -> None:
    torch.manual_seed(0)
    lengths, ranks, scales, width = (1100, 3, 600), (5, 40, 16), (0.5, 2.0, 1.0), 128
    x = torch.randn(sum(lengths), width).to(torch.bfloat16)
    s = torch.randn(sum(lengths), 48).to(torch.bfloat16)
    gradients = [torch.randn(rank, width) for rank in ranks]
    before = [gradient.clone() for gradient in gradients]
    tables, table = SegmentTables(lengths, [1, 2, 3]), RankTable(ranks, list(scales))

    with ptx_on_cpu(90) as launches:
        launch.wgrad(s, x, Factors(gradients, width), tables, table, scaled=True, accumulate=True)

    assert launches.counts["reduce_kernel"] > 0
    first = 0
    for length, rank, scale, old, new in zip(lengths, ranks, scales, before, gradients, strict=True):
        rows = slice(first, first + length)
        right = old.double() + scale * s[rows, :rank].double().T @ x[rows].double()
        assert off_by(new, right) < 1e-5
        first += length


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_the_loss_and_its_gradient_in_bf16_are_right_to_the_rounding_of_bf16(softcap: float | None) -> None:
    torch.manual_seed(0)
    num_rows, vocab_size = 5, 9000
    logits = torch.empty(num_rows, row_stride(vocab_size), dtype=torch.bfloat16)[:, :vocab_size]
    logits.copy_(5 * torch.randn(num_rows, vocab_size))
    targets = torch.randint(0, vocab_size, (num_rows,))
    exact = logits.double().requires_grad_()
    capped = exact if softcap is None else softcap * torch.tanh(exact / softcap)
    right = torch.nn.functional.cross_entropy(capped, targets, reduction="none")
    right.sum().backward()

    with ptx_on_cpu(90):
        losses = cross_entropy_(logits, targets, softcap=softcap)

    torch.testing.assert_close(losses.double(), right.detach(), rtol=1e-5, atol=1e-5)
    assert exact.grad is not None
    assert off_by(logits, exact.grad) < 4e-3


@pytest.mark.parametrize(
    ("capability", "products"),
    [pytest.param(90, "wgmma", marks=pytest.mark.slow), pytest.param(80, "mma", marks=pytest.mark.slow)],
)
def test_attention_of_short_rows_is_as_near_to_float64_as_torch_in_bf16_and_moves_each_number_once(
    capability: int, products: str
) -> None:
    torch.manual_seed(0)
    lengths, heads, key_heads, channels = (40, 64, 70, 5), 8, 2, 128
    counts = heads, key_heads, key_heads, heads
    *tensors, dout = (torch.randn(sum(lengths), count, channels).to(torch.bfloat16) for count in counts)
    tensors[1][104:174] = NAN  # a row that is too long, and left out
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]

    with ptx_on_cpu(capability) as launches:
        out = short_row_attention(*leaves, bounds, is_causal=True, window=None, scaling=channels**-0.5)
        found = [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    def of_row(rows: slice, dtype: torch.dtype) -> list[torch.Tensor]:
        own = [tensor[rows].to(dtype).requires_grad_() for tensor in tensors]
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in own)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        attended = attended[0].transpose(0, 1)
        return [attended.detach(), *torch.autograd.grad(attended, own, dout[rows].to(dtype))]

    for rows in (slice(0, 40), slice(40, 104), slice(174, 179)):
        right, in_torch = of_row(rows, torch.float64), of_row(rows, torch.bfloat16)
        for own, plain, exact in zip(found, in_torch, right, strict=True):
            assert off_by(own[rows], exact) < max(1.3 * off_by(plain, exact), 3e-3)
    assert products in launches.opcodes
    short_tokens, pair_bytes = 40 + 64 + 5, channels * 2
    for kernel, moves in (("forward", 2 * heads + 2 * key_heads), ("backward", 3 * heads + 4 * key_heads)):
        # And every thread reads where its row begins and ends.
        moved = launches.moved_bytes[f"attention_{kernel}_kernel"]
        assert moved == pytest.approx(short_tokens * moves * pair_bytes, rel=0.03)


MUTATIONS: dict[str, Callable[[str], str]] = {
    "waits of copies are left out": lambda ptx: re.sub(r"cp\.async\.wait_group\s+\d+;", "", ptx),
    "waits come two groups late": lambda ptx: re.sub(
        r"cp\.async\.wait_group\s+(\d+);", lambda found: f"cp.async.wait_group {int(found.group(1)) + 2};", ptx
    ),
    "rows beyond the last are read": lambda ptx: re.sub(r"selp\.b32\s+(%r\d+), 16, 0, %p\d+;", r"mov.b32 \1, 16;", ptx),
    "a bound is off by one": lambda ptx: ptx.replace("setp.lt.s32", "setp.le.s32"),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_fault_in_the_compiled_code_is_seen(mutation: str) -> None:
    torch.manual_seed(0)
    lengths, ranks, width = (40, 25), (16, 8), 512
    x = torch.randn(sum(lengths), width).to(torch.bfloat16)
    factors = [torch.randn(rank, width).to(torch.bfloat16) for rank in ranks]
    with ptx_on_cpu(90):
        right, _ = shrink_and_wgrad(lengths, ranks, x, factors, 0.0, seeds=[1, 2])

    try:
        with ptx_on_cpu(90, MUTATIONS[mutation]) as launches:
            found, _ = shrink_and_wgrad(lengths, ranks, x, factors, 0.0, seeds=[1, 2])
    except PtxFault:
        return
    assert launches.counts, "nothing ran"
    assert not torch.equal(found, right), "the fault was not seen"
