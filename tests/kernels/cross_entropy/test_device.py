"""The fused cross-entropy against torch in float64, run by Triton's interpreter in a process of its own.

Triton decides when it is imported whether kernels are compiled or interpreted, and other tests compile; so this file
is also the script of a child process that runs every case and hands its results back as numbers.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.children import run_script
from tests.kernels.compiling import Compilation, compiled, listing, run_compiling, usage_of
from tests.kernels.cross_entropy.cases import TRANSFORMS, relative
from tests.kernels.interpreter import keep_patches

# One entry, less than a block, exactly one and two blocks, and a block with one or many entries more.
VOCABULARIES = (1, 53, 64, 8192, 8193, 16384, 20000)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton absent")


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


def edited(case: Case, edit: Callable[[torch.Tensor, torch.Tensor], None], **options: Any) -> Case:
    """Return a case after `edit` has written into copies of its logits and targets."""
    logits, targets = case.logits.clone(), case.targets.clone()
    edit(logits, targets)
    return Case(logits, targets, {**case.options, **options})


def _write(where: Any, value: float) -> Callable[[torch.Tensor, torch.Tensor], None]:
    def edit(logits: torch.Tensor, targets: torch.Tensor) -> None:
        logits[where] = value

    return edit


def _aim(row: int, target: int) -> Callable[[torch.Tensor, torch.Tensor], None]:
    def edit(logits: torch.Tensor, targets: torch.Tensor) -> None:
        targets[row] = target

    return edit


def _lift(logits: torch.Tensor, targets: torch.Tensor) -> None:
    logits += 1e4


def _late_start(logits: torch.Tensor, targets: torch.Tensor) -> None:
    logits[0, :8192] = float("-inf")
    logits[0, 8192:] -= 1e4
    targets[0] = 8200


def _staircase(logits: torch.Tensor, targets: torch.Tensor) -> None:
    logits[1, :8192] += 500.0  # the maximum of the first block, of the last, and of the one between
    logits[2, 16384:] += 500.0
    logits[3, 8192:16384] += 500.0


def padded(case: Case, stride: int) -> Case:
    """Return the same with rows further apart, and sevens between them."""
    wide = torch.full((len(case.logits), stride), 7.0, dtype=case.logits.dtype)
    wide[:, : case.logits.shape[1]] = case.logits
    return case._replace(logits=wide[:, : case.logits.shape[1]])


def build_cases() -> dict[str, Case]:
    """Return every case by name; child and parent build the same ones."""
    small, large = random_case(5, 53), random_case(4, 20000, seed=1)
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
        "all near 1e4": edited(random_case(6, 9001, seed=6), _lift),
        "sure of the target": edited(small, lambda logits, targets: _raise_target(logits, targets, 12.0)),
        "-inf beside the target": edited(small, _write((slice(None), slice(0, 9)), float("-inf"))),
        "-inf, capped": edited(small, _write((slice(None), slice(0, 9)), float("-inf")), softcap=2.0),
        "-inf first": edited(large, _late_start),
        "maximum anywhere": edited(large, _staircase),
        "-inf at the target": edited(small, lambda logits, targets: _raise_target(logits, targets, float("-inf"))),
        "all -inf in row 1": edited(small, _write(1, float("-inf"))),
        "inf in row 1": edited(small, _write((1, 4), float("inf"))),
        "NaN in row 1": edited(small, _write((1, 4), float("nan"))),
        "NaN in row 1, capped": edited(small, _write((1, 4), float("nan")), softcap=2.0),
        "NaN in row 2 of many blocks": edited(large, _write((2, 19999), float("nan"))),
        "target too high in row 1": edited(small, _aim(1, 53)),
        "negative target in row 1": edited(small, _aim(1, -1)),
    }


def _raise_target(logits: torch.Tensor, targets: torch.Tensor, by: float) -> None:
    logits[torch.arange(len(targets)), targets] += by


def run_cases(path: str) -> None:
    """In the child: run every case and write losses, and what became of the logits, to `path`."""
    from peft_mux.kernels.cross_entropy.device import cross_entropy_

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
    complaints = json.loads(run_script(__file__, "cases", path, TRITON_INTERPRET="1"))
    with np.load(path) as arrays:
        return Results(dict(arrays), complaints)


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


def assert_near(results: Results, name: str, tolerance: float = 1e-5, gradient_tolerance: float | None = None) -> None:
    found, wanted = results[name], reference(results.cases[name])
    assert torch.isfinite(found.losses).all()
    assert torch.isfinite(found.logits).all()
    assert relative(found.losses, wanted.losses) < tolerance
    assert relative(found.logits, wanted.logits) < (gradient_tolerance or tolerance)


def assert_other_rows_equal(found: Result, wanted: Result, row: int) -> None:
    others = [index for index in range(len(wanted.losses)) if index != row]
    assert torch.equal(found.losses[others], wanted.losses[others])
    assert torch.equal(found.logits[others], wanted.logits[others])


@needs_triton
@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_losses_and_gradient_are_those_of_torch_in_float64(results: Results, transform: str, vocab: int) -> None:
    assert_near(results, f"{transform} {vocab}")


@needs_triton
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_only_the_gradient_is_rounded_to_the_dtype_of_the_logits(results: Results, dtype: str, transform: str) -> None:
    assert_near(results, f"{dtype} {transform}", gradient_tolerance=1e-5 if dtype == "fp32" else 1e-2)


@needs_triton
@pytest.mark.parametrize("name", ["huge", "huge and capped", "all near 1e4", "sure of the target", "maximum anywhere"])
def test_size_and_place_of_the_largest_logits_cost_no_accuracy(results: Results, name: str) -> None:
    assert_near(results, name)


@needs_triton
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


@needs_triton
def test_a_target_of_minus_infinity_costs_infinitely_much_and_has_a_finite_gradient(results: Results) -> None:
    found, case = results["-inf at the target"], results.cases["-inf at the target"]
    assert torch.equal(found.losses, torch.full((5,), float("inf")))
    wanted = torch.softmax(case.logits.double(), dim=-1)
    wanted[torch.arange(5), case.targets] -= 1
    assert relative(found.logits, wanted) < 1e-5


@needs_triton
def test_a_row_has_the_same_bits_alone_and_with_others(results: Results) -> None:
    alone, company = results["row 2 alone"], results["small"]
    assert torch.equal(alone.losses, company.losses[2:3])
    assert torch.equal(alone.logits, company.logits[2:3])


@needs_triton
def test_no_rows_give_no_losses(results: Results) -> None:
    assert results["no rows"].losses.shape == (0,)


@needs_triton
def test_without_gradient_the_logits_stay_and_the_losses_are_the_same(results: Results) -> None:
    assert torch.equal(results["no gradient"].logits, results.cases["large"].logits.double())
    assert torch.equal(results["no gradient"].losses, results["gradient too"].losses)
    assert not torch.equal(results["gradient too"].logits, results["no gradient"].logits)


@needs_triton
def test_nothing_is_written_between_rows_that_are_apart(results: Results) -> None:
    found, wanted = results["padded"], reference(results.cases["padded"])
    assert relative(found.losses, wanted.losses) < 1e-5
    assert relative(found.logits[:, :8200], wanted.logits) < 1e-5
    assert (found.logits[:, 8200:] == 7).all()


@needs_triton
@pytest.mark.parametrize(
    ("name", "row"), [("NaN in row 1", 1), ("NaN in row 1, capped", 1), ("NaN in row 2 of many blocks", 2)]
)
def test_a_nan_fills_its_own_row_and_touches_no_other(results: Results, name: str, row: int) -> None:
    found = results[name]
    assert torch.isnan(found.losses[row])
    assert torch.isnan(found.logits[row]).all()
    clean = {"NaN in row 1": "small", "NaN in row 2 of many blocks": "large"}.get(name)
    if clean is not None:
        assert_other_rows_equal(found, results[clean], row)
    assert torch.isfinite(found.losses).sum() == len(found.losses) - 1
    assert torch.isfinite(found.logits).all(dim=1).sum() == len(found.losses) - 1


@needs_triton
@pytest.mark.parametrize("name", ["all -inf in row 1", "inf in row 1"])
def test_a_row_without_a_distribution_is_as_broken_as_torch_says_and_breaks_no_other(
    results: Results, name: str
) -> None:
    found, logits = results[name], results.cases[name].logits.double()
    log_normaliser = torch.logsumexp(logits, dim=-1)
    assert torch.allclose(
        found.losses[1].double(), log_normaliser[1] - logits[1, results.cases[name].targets[1]], equal_nan=True
    )
    assert torch.isnan(found.logits[1]).any()
    assert_other_rows_equal(found, results["small"], 1)


@needs_triton
@pytest.mark.parametrize("name", ["target too high in row 1", "negative target in row 1"])
def test_a_target_outside_of_the_vocabulary_makes_nans_of_its_row_alone(results: Results, name: str) -> None:
    assert torch.isnan(results[name].losses[1])
    assert torch.isnan(results[name].logits[1]).all()
    assert_other_rows_equal(results[name], results["small"], 1)


BAD_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "float64": ({"dtype": torch.float64}, "logits must be bf16, fp16 or fp32 with adjacent columns, got"),
    "columns apart": ({"transposed": True}, "adjacent columns"),
    "int32 targets": ({"targets": torch.int32}, "targets must be contiguous int64 [3], got torch.int32 of shape (3,)"),
    "out in bf16": ({"out": torch.bfloat16}, "out must be contiguous float32 [3], got torch.bfloat16 of shape (3,)"),
}


def complain() -> None:
    """In the child: print what every bad call is refused with."""
    from peft_mux.kernels.cross_entropy.device import cross_entropy_

    messages = {}
    for name, (spec, _) in BAD_CALLS.items():
        logits = torch.zeros(spec.get("shape", (3, 8)), dtype=spec.get("dtype", torch.float32))
        if "transposed" in spec:
            logits = torch.zeros(8, 3).t()
        targets = torch.zeros(len(logits), dtype=spec.get("targets", torch.int64))
        out = torch.empty(len(logits), dtype=spec["out"]) if "out" in spec else None
        try:
            cross_entropy_(logits, targets, out=out)
            messages[name] = "accepted"
        except ValueError as error:
            messages[name] = str(error)
    print(json.dumps(messages))


@needs_triton
@pytest.mark.parametrize("name", BAD_CALLS)
def test_what_the_kernel_cannot_take_is_refused_by_name(results: Results, name: str) -> None:
    assert BAD_CALLS[name][1] in results.complaints[name]


# dtype of the logits, vocabulary, soft-cap: the largest blocks, and a vocabulary of odd size.
COMPILED = [("*bf16", 128256, False), ("*bf16", 256000, True), ("*fp32", 50257, True), ("*fp16", 53, False)]


def compile_for_sm90(folder: Path) -> None:
    """In the child: compile without a device and print what the assembler says about registers and stack."""
    from peft_mux.kernels.cross_entropy import device as module

    kernel = module._cross_entropy_kernel
    types = dict.fromkeys(kernel.arg_names, "i32")
    types |= {"targets_ptr": "*i64", "losses_ptr": "*fp32", "scale": "fp32", "softcap": "fp32"}
    aligned = [name for name in types if name.endswith("_ptr") or name == "row_stride"]
    report = {}
    for dtype, vocab, softcap in COMPILED:
        block, warps = module.launch_shape(vocab)
        constants = {"V": vocab, "BLOCK": block, "HAS_SOFTCAP": softcap, "WITH_GRADIENT": True}
        given, options = {**types, "logits_ptr": dtype}, {"num_warps": warps}
        cubin = folder / f"{vocab}.cubin"
        usage = usage_of(compiled(Compilation(kernel, given, constants, aligned, options)), cubin)
        usage["wide loads"] = len(re.findall(r"LDG\.E\S*\.128", listing(cubin)))
        usage["atomics"] = len(re.findall(r"\b(?:RED|ATOM)G?\.", listing(cubin)))
        report[f"{dtype} {vocab}"] = usage
    print(json.dumps(report))


@pytest.mark.slow
@needs_triton
def test_the_kernel_compiles_for_sm_90_without_spills_and_with_wide_loads(tmp_path: Path) -> None:
    report = run_compiling(__file__, tmp_path)
    assert len(report) == len(COMPILED)
    for name, found in report.items():
        assert (found["stack"], found["local"], found["atomics"]) == (0, 0, 0), name
        assert found["registers"] <= 64, name  # two programs of 512 threads on a multiprocessor
    assert report["*bf16 128256"]["wide loads"] > 0
    assert report["*fp32 50257"]["wide loads"] > 0  # except in its tail, a vocabulary of odd size is read as fast


@pytest.mark.gpu
@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_on_a_gpu_losses_and_gradient_are_those_of_torch_in_float64(transform: str, dtype: str) -> None:
    from peft_mux.kernels.cross_entropy.device import cross_entropy_

    for vocab in (53, 50257, 128256):
        case = random_case(33, vocab, seed=vocab, **TRANSFORMS[transform])
        case = case._replace(logits=case.logits.to(DTYPES[dtype]))
        logits, targets = case.logits.cuda(), case.targets.cuda()
        losses = cross_entropy_(logits, targets, **case.options)
        wanted = reference(case)
        assert relative(losses.cpu(), wanted.losses) < 1e-5
        assert relative(logits.cpu(), wanted.logits) < (1e-5 if dtype == "fp32" else 5e-3)


if __name__ == "__main__":
    if sys.argv[1] == "cases":
        keep_patches()
        run_cases(sys.argv[2])
        complain()
    else:
        compile_for_sm90(Path(sys.argv[1]))
