"""The fused cross-entropy against torch in float64, run by Triton's interpreter in a process of its own.

Triton decides when it is imported whether kernels are compiled or interpreted, and other tests compile; so this file
is also the script of a child process that runs every case and hands its results back as numbers.
"""

from __future__ import annotations

import json
import sys
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.children import run_script
from tests.kernels.cross_entropy.cases import TRANSFORMS, relative
from tests.kernels.interpreter import keep_patches

pytest.importorskip("triton")

# One entry, less than a block, exactly one and two blocks, and a block with one or many entries more.
VOCABULARIES = (1, 53, 64, 8192, 8193, 16384, 20000)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NAN, INF = float("nan"), float("inf")


class Case(NamedTuple):
    """What the kernel is called with."""

    logits: torch.Tensor
    targets: torch.Tensor
    options: dict[str, Any] = {}


def random_case(num_rows: int, vocab_size: int, *, spread: float = 2.0, seed: int = 0, **options: Any) -> Case:
    """Return random logits and targets."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * spread
    return Case(logits, torch.randint(vocab_size, (num_rows,), generator=generator), options)


def written(case: Case, *writes: tuple[Any, float], **options: Any) -> Case:
    """Return a case with values written into places of its logits."""
    logits = case.logits.clone()
    for place, value in writes:
        logits[place] = value
    return Case(logits, case.targets, {**case.options, **options})


def with_target(case: Case, target: int, row: int = 1) -> Case:
    """Return a case with another target in a row."""
    targets = case.targets.clone()
    targets[row] = target
    return case._replace(targets=targets)


def padded(case: Case, stride: int) -> Case:
    """Return the same with rows further apart, and sevens between them."""
    wide = torch.full((len(case.logits), stride), 7.0, dtype=case.logits.dtype)
    wide[:, : case.logits.shape[1]] = case.logits
    return case._replace(logits=wide[:, : case.logits.shape[1]])


def build_cases() -> dict[str, Case]:
    """Return every case by name; child and parent build the same ones."""
    small, large = random_case(5, 53), random_case(4, 20000, seed=1)
    every_row, nine = slice(None), slice(0, 9)
    at_targets = (torch.arange(5), small.targets)
    stairs = large.logits.clone()  # the maximum in the first block, in the last, and in the one between
    stairs[1, :8192] += 500.0
    stairs[2, 16384:] += 500.0
    stairs[3, 8192:16384] += 500.0
    late = written(large, ((0, slice(0, 8192)), -INF), ((0, slice(8192, None)), -1e4))
    near_1e4 = random_case(6, 9001, seed=6)
    cases = {
        f"{transform} {vocab}": random_case(4, vocab, seed=vocab, **options)
        for transform, options in TRANSFORMS.items()
        for vocab in VOCABULARIES
    }
    for name, dtype in DTYPES.items():
        for transform, options in TRANSFORMS.items():
            case = random_case(4, 9001, seed=3, **options)
            cases[f"{name} {transform}"] = case._replace(logits=case.logits.to(dtype))
    return cases | {
        "small": small,
        "large": large,
        "row 2 alone": Case(small.logits[2:3].clone(), small.targets[2:3].clone()),
        "padded": padded(random_case(4, 8200, seed=5), 8208),
        "no rows": Case(small.logits[:0].clone(), small.targets[:0].clone()),
        "no gradient": Case(large.logits, large.targets, {"with_gradient": False, "softcap": 3.0}),
        "gradient too": Case(large.logits, large.targets, {"softcap": 3.0}),
        "huge": random_case(6, 9001, spread=1e4, seed=6),
        "huge and capped": random_case(6, 9001, spread=1e4, seed=6, softcap=30.0),
        "all near 1e4": near_1e4._replace(logits=near_1e4.logits + 1e4),
        "sure of the target": written(small, (at_targets, 10.0)),
        "maximum anywhere": large._replace(logits=stairs),
        "-inf beside the target": written(small, ((every_row, nine), -INF)),
        "-inf, capped": written(small, ((every_row, nine), -INF), softcap=2.0),
        "-inf first": with_target(late, 8200, row=0),
        "-inf at the target": written(small, (at_targets, -INF)),
        "all -inf in row 1": written(small, (1, -INF)),
        "inf in row 1": written(small, ((1, 4), INF)),
        "NaN in row 1": written(small, ((1, 4), NAN)),
        "NaN in row 1, capped": written(small, ((1, 4), NAN), softcap=2.0),
        "NaN in row 2 of many blocks": written(large, ((2, 19999), NAN)),
        "target too high in row 1": with_target(small, 53),
        "negative target in row 1": with_target(small, -1),
    }


def run_cases(path: str) -> None:
    """In the child: run every case and write losses, and what became of the logits, to `path`."""
    from peft_mux.kernels.cross_entropy.logits_kernel import cross_entropy_

    arrays = {}
    for name, case in build_cases().items():
        whole = case.logits if case.logits.is_contiguous() else case.logits._base
        assert whole is not None
        whole = whole.clone()
        logits = whole[:, : case.logits.shape[1]]
        around = torch.full((len(logits) + 1,), 7.0)
        out = around[:-1]
        losses = cross_entropy_(logits, case.targets, out=out, **case.options)
        assert losses is out, name
        assert around[-1] == 7, name
        arrays[f"{name}|losses"] = losses.numpy()
        arrays[f"{name}|logits"] = whole.double().numpy()
    np.savez(path, **arrays)


LOGITS, TARGETS = torch.zeros(3, 8), torch.zeros(3, dtype=torch.int64)
BAD_CALLS: dict[str, tuple[tuple[Any, ...], str]] = {
    "float64": ((LOGITS.double(), TARGETS, None), "logits must be bf16, fp16 or fp32 with adjacent columns, got"),
    "columns apart": ((torch.zeros(8, 3).t(), TARGETS, None), "adjacent columns"),
    "int32 targets": ((LOGITS, TARGETS.int(), None), "targets must be contiguous int64 [3], got torch.int32 of shape"),
    "out in bf16": ((LOGITS, TARGETS, torch.empty(3).bfloat16()), "out must be contiguous float32 [3], got torch.bf"),
}


def complaints() -> dict[str, str]:
    """In the child: return what every bad call is refused with."""
    from peft_mux.kernels.cross_entropy.logits_kernel import cross_entropy_

    messages = {}
    for name, ((logits, targets, out), _) in BAD_CALLS.items():
        try:
            cross_entropy_(logits.clone(), targets, out=out)
            messages[name] = "accepted"
        except ValueError as error:
            messages[name] = str(error)
    return messages


class Result(NamedTuple):
    losses: torch.Tensor
    logits: torch.Tensor


class Results:
    """What the child found, by case."""

    def __init__(self, arrays: dict[str, np.ndarray], complaints: dict[str, str]) -> None:
        self._arrays, self.complaints = arrays, complaints
        self.cases = build_cases()

    def __getitem__(self, name: str) -> Result:
        return Result(*(torch.from_numpy(self._arrays[f"{name}|{part}"]) for part in ("losses", "logits")))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    path = str(tmp_path_factory.mktemp("cross_entropy") / "results.npz")
    said = json.loads(run_script(__file__, path, TRITON_INTERPRET="1"))
    with np.load(path) as arrays:
        return Results(dict(arrays), said)


def reference(case: Case) -> Result:
    """Return losses and gradient by torch in float64."""
    logits = case.logits.detach().double().requires_grad_()
    transformed = logits * case.options.get("scale", 1.0)
    softcap = case.options.get("softcap")
    if softcap is not None:
        transformed = softcap * torch.tanh(transformed / softcap)
    losses = F.cross_entropy(transformed, case.targets, reduction="none")
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    return Result(losses.detach(), gradient)


def assert_other_rows_equal(found: Result, wanted: Result, row: int) -> None:
    others = [index for index in range(len(wanted.losses)) if index != row]
    assert torch.equal(found.losses[others], wanted.losses[others])
    assert torch.equal(found.logits[others], wanted.logits[others])


LARGE = ("huge", "huge and capped", "all near 1e4", "sure of the target", "maximum anywhere")


@pytest.mark.parametrize(
    "name", [f"{transform} {size}" for transform in TRANSFORMS for size in VOCABULARIES] + list(LARGE)
)
def test_losses_and_gradient_are_those_of_torch_in_float64(results: Results, name: str) -> None:
    found, wanted = results[name], reference(results.cases[name])
    assert relative(found.losses, wanted.losses) < 1e-5
    assert relative(found.logits, wanted.logits) < 1e-5


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_only_the_gradient_is_rounded_to_the_dtype_of_the_logits(results: Results, dtype: str, transform: str) -> None:
    found, wanted = results[f"{dtype} {transform}"], reference(results.cases[f"{dtype} {transform}"])
    assert relative(found.losses, wanted.losses) < 1e-5
    assert relative(found.logits, wanted.logits) < (1e-5 if dtype == "fp32" else 1e-2)


@pytest.mark.parametrize("name", ["-inf beside the target", "-inf, capped", "-inf first"])
def test_logits_of_minus_infinity_have_no_part_in_the_loss(results: Results, name: str) -> None:
    case = results.cases[name]
    off = torch.isinf(case.logits)
    hit = off[torch.arange(len(off)), case.targets]
    if "capped" not in name:
        assert (results[name].logits[off & ~hit[:, None]] == 0).all()
    found, wanted = results[name], reference(case)
    assert torch.equal(torch.isinf(found.losses), torch.isinf(wanted.losses))
    finite = torch.isfinite(wanted.losses)
    assert finite.any()
    assert relative(found.losses[finite], wanted.losses[finite]) < 1e-5
    # Torch's tanh has a finite derivative at -inf and so has ours: 0.
    assert relative(found.logits[finite], wanted.logits[finite]) < 1e-5


def test_a_target_of_minus_infinity_costs_infinitely_much_and_has_a_finite_gradient(results: Results) -> None:
    found, case = results["-inf at the target"], results.cases["-inf at the target"]
    assert torch.equal(found.losses, torch.full((5,), INF))
    wanted = torch.softmax(case.logits.double(), dim=-1)
    wanted[torch.arange(5), case.targets] -= 1
    assert relative(found.logits, wanted) < 1e-5


def test_a_row_has_the_same_bits_alone_and_with_others_and_no_row_has_none(results: Results) -> None:
    alone, company = results["row 2 alone"], results["small"]
    assert torch.equal(alone.losses, company.losses[2:3])
    assert torch.equal(alone.logits, company.logits[2:3])
    assert results["no rows"].losses.shape == (0,)


def test_without_gradient_the_logits_stay_and_the_losses_are_the_same(results: Results) -> None:
    assert torch.equal(results["no gradient"].logits, results.cases["large"].logits.double())
    assert torch.equal(results["no gradient"].losses, results["gradient too"].losses)
    assert not torch.equal(results["gradient too"].logits, results["no gradient"].logits)


def test_nothing_is_written_between_rows_that_are_apart(results: Results) -> None:
    found, wanted = results["padded"], reference(results.cases["padded"])
    assert relative(found.losses, wanted.losses) < 1e-5
    assert relative(found.logits[:, :8200], wanted.logits) < 1e-5
    assert (found.logits[:, 8200:] == 7).all()


@pytest.mark.parametrize(
    ("name", "clean", "row"),
    [
        ("NaN in row 1", "small", 1),
        ("NaN in row 1, capped", None, 1),
        ("NaN in row 2 of many blocks", "large", 2),
        ("target too high in row 1", "small", 1),
        ("negative target in row 1", "small", 1),
    ],
)
def test_a_nan_and_a_target_outside_of_the_vocabulary_fill_their_own_row_and_touch_no_other(
    results: Results, name: str, clean: str | None, row: int
) -> None:
    found = results[name]
    assert torch.isnan(found.losses[row])
    assert torch.isnan(found.logits[row]).all()
    assert torch.isfinite(found.losses).sum() == len(found.losses) - 1
    assert torch.isfinite(found.logits).all(dim=1).sum() == len(found.losses) - 1
    if clean is not None:
        assert_other_rows_equal(found, results[clean], row)


@pytest.mark.parametrize("name", ["all -inf in row 1", "inf in row 1"])
def test_a_row_without_a_distribution_is_as_broken_as_torch_says_and_breaks_no_other(
    results: Results, name: str
) -> None:
    found, logits = results[name], results.cases[name].logits.double()
    wanted = torch.logsumexp(logits, dim=-1)[1] - logits[1, results.cases[name].targets[1]]
    assert torch.allclose(found.losses[1].double(), wanted, equal_nan=True)
    assert torch.isnan(found.logits[1]).any()
    assert_other_rows_equal(found, results["small"], 1)


@pytest.mark.parametrize("name", BAD_CALLS)
def test_what_the_kernel_cannot_take_is_refused_by_name(results: Results, name: str) -> None:
    assert BAD_CALLS[name][1] in results.complaints[name]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_on_a_gpu_losses_and_gradient_are_those_of_torch_in_float64(transform: str, dtype: str) -> None:
    from peft_mux.kernels.cross_entropy.logits_kernel import cross_entropy_

    for vocab in (53, 50257, 128256):
        case = random_case(33, vocab, seed=vocab, **TRANSFORMS[transform])
        case = case._replace(logits=case.logits.to(DTYPES[dtype]))
        logits, targets = case.logits.cuda(), case.targets.cuda()
        losses = cross_entropy_(logits, targets, **case.options)
        wanted = reference(case)
        assert relative(losses.cpu(), wanted.losses) < 1e-5
        assert relative(logits.cpu(), wanted.logits) < (1e-5 if dtype == "fp32" else 5e-3)


if __name__ == "__main__":
    keep_patches()
    run_cases(sys.argv[1])
    print(json.dumps(complaints()))
