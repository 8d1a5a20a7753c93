"""The joint AdamW kernel against `torch.optim.AdamW`, run by Triton's interpreter in a process of its own.

Triton decides when it is imported whether kernels are compiled or interpreted, and other tests compile; so this file
is also the script of a child process that runs every case and hands its results back as numbers.
"""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.children import run_script
from tests.kernels.interpreter import keep_patches

NUM_STEPS = 5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PARTS = ("values", "gradient", "exp_avg", "exp_avg_sq", "last_good")

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton absent")


class TaskCase(NamedTuple):
    """A task's pages and how it steps.

    Attributes:
        sizes: elements of its pages; the last of several does not decay.
        first_step: of the first update that the case takes.
    """

    seed: int
    sizes: tuple[int, ...]
    rate: float = 1e-2
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 0.0
    dtype: torch.dtype = torch.float32
    shift: int = 0

    def decay_of(self, page: int) -> float:
        return 0.0 if len(self.sizes) > 1 and page == len(self.sizes) - 1 else self.weight_decay

    def rate_at(self, step: int) -> float:
        return self.rate * (1 - step / 10)

    def random(self, size: int, seed: int, scale: float) -> torch.Tensor:
        """Return random numbers; `shift` elements into a buffer, where an address is a multiple of 4 bytes alone."""
        generator = torch.Generator().manual_seed(seed)
        made = (torch.randn(size, generator=generator) * scale).to(self.dtype)
        return torch.cat([made.new_zeros(self.shift), made])[self.shift :]

    def weights(self) -> list[torch.Tensor]:
        return [self.random(size, 1000 * self.seed + page, 1e-2) for page, size in enumerate(self.sizes)]

    def gradients(self, step: int) -> list[torch.Tensor]:
        # growing, so that a limit binds in some steps only
        scale = 10.0 ** (step - 3)
        seeds = [1000 * self.seed + 100 + 10 * page + step for page in range(len(self.sizes))]
        return [self.random(size, seed, scale) for size, seed in zip(self.sizes, seeds, strict=True)]


# One element, less than a block, exactly a block, one more, and several; a page that decays and one that does not.
TASKS = {
    "one element": TaskCase(1, (1,), rate=3e-2),
    "small": TaskCase(2, (100,), betas=(0.5, 0.7), eps=1e-3, weight_decay=0.3),
    "block": TaskCase(3, (2048,), weight_decay=0.01, max_grad_norm=0.5),
    "block and one": TaskCase(4, (2049,), betas=(0.0, 0.9), max_grad_norm=1e6),
    "two pages": TaskCase(5, (5000, 37), rate=1e-3, weight_decay=0.1, max_grad_norm=1.0),
    "no momentum to speak of": TaskCase(6, (77, 4096), betas=(0.3, 0.999), eps=1e-5, weight_decay=0.2),
}
CROWD = {f"crowd {number}": TaskCase(20 + number, (number % 5 + 1,), rate=1e-3 * (number + 1)) for number in range(37)}
OTHER_DTYPES = {
    name: TaskCase(60 + index, (3000,), eps=1e-3, weight_decay=0.1, max_grad_norm=500.0, dtype=dtype)
    for index, (name, dtype) in enumerate(DTYPES.items())
}
# loss and norm that replace the right ones, per task
BROKEN: dict[str, tuple[float, float | None]] = {
    "NaN loss": (float("nan"), None),
    "infinite loss": (float("inf"), None),
    "minus infinite loss": (float("-inf"), None),
    "NaN norm": (1.0, float("nan")),
    "infinite norm": (1.0, float("inf")),
}


class Run(NamedTuple):
    tasks: dict[str, TaskCase]
    broken: str = ""
    verdict: str = ""
    num_steps: int = NUM_STEPS


def build_runs() -> dict[str, Run]:
    """Return every run by name; child and parent build the same ones."""
    runs = {"together": Run(TASKS), "crowd": Run(CROWD, num_steps=2), "dtypes": Run(OTHER_DTYPES)}
    runs |= {f"{name} alone": Run({name: task}) for name, task in TASKS.items()}
    runs |= {f"{verdict} of {name}": Run(TASKS, name, verdict, 1) for verdict, name in zip(BROKEN, TASKS, strict=False)}
    runs["one step"] = Run(TASKS, num_steps=1)
    shifted = {name: TASKS[name]._replace(shift=1) for name in ("block and one", "two pages")}
    return {**runs, "shifted": Run(shifted)}


def pages_of(name: str, task: TaskCase) -> list[dict[str, torch.Tensor]]:
    made = []
    for weights in task.weights():
        page = {part: torch.cat([weights.new_zeros(task.shift + weights.numel())])[task.shift :] for part in PARTS}
        page["values"].copy_(weights)
        made.append(page)
    return made


def run_cases(path: str, device: str = "cpu") -> None:
    """In the child: take the steps of every run with the kernel and write what is left to a file."""
    from peft_mux.kernels.adamw.device import multi_adamw_
    from peft_mux.kernels.adamw.pages import PageUpdate
    from peft_mux.kernels.adamw.update import total_norms

    arrays = {}
    for run_name, run in build_runs().items():
        pages = {name: pages_of(name, task) for name, task in run.tasks.items()}
        pages = {name: [{k: v.to(device) for k, v in page.items()} for page in own] for name, own in pages.items()}
        for step in range(run.num_steps):
            updates = []
            for column, (name, task) in enumerate(run.tasks.items()):
                for number, (page, gradient) in enumerate(zip(pages[name], task.gradients(step), strict=True)):
                    page["gradient"].copy_(gradient)
                    update = PageUpdate(
                        **page,
                        task=column,
                        step=step + 1,
                        rate=task.rate_at(step),
                        betas=task.betas,
                        eps=task.eps,
                        weight_decay=task.decay_of(number),
                        max_grad_norm=task.max_grad_norm,
                    )
                    updates.append(update)
            norms = total_norms([[page["gradient"] for page in own] for own in pages.values()])
            verdicts = torch.stack([torch.ones(len(norms), device=device), torch.stack([n.float() for n in norms])])
            if run.broken:
                loss, norm = BROKEN[run.verdict]
                column = list(run.tasks).index(run.broken)
                verdicts[0, column] = loss
                verdicts[1, column] = verdicts[1, column] if norm is None else norm
            multi_adamw_(updates, verdicts)
        for name, own in pages.items():
            for number, page in enumerate(own):
                arrays |= {f"{run_name}|{name}|{number}|{part}": page[part].float().cpu().numpy() for part in PARTS}
    np.savez(path, **arrays)


class Results:
    """What the child found: the pages of each task after a run, each part as fp32."""

    def __init__(self, path: str) -> None:
        with np.load(path) as arrays:
            self._arrays = dict(arrays)
        self.runs = build_runs()

    def pages(self, run: str, task: str) -> list[dict[str, torch.Tensor]]:
        sizes = self.runs[run].tasks[task].sizes
        return [
            {part: torch.from_numpy(self._arrays[f"{run}|{task}|{page}|{part}"]) for part in PARTS}
            for page in range(len(sizes))
        ]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    path = str(tmp_path_factory.mktemp("multi_adamw") / "results.npz")
    run_script(__file__, "cases", path, TRITON_INTERPRET="1")
    return Results(path)


def expected(task: TaskCase, num_steps: int) -> list[dict[str, torch.Tensor]]:
    """Return what the task's own `torch.optim.AdamW` leaves, and the weights before its last step."""
    weights = [torch.nn.Parameter(page) for page in task.weights()]
    groups = [{"params": [page], "weight_decay": task.decay_of(number)} for number, page in enumerate(weights)]
    optimizer = torch.optim.AdamW(groups, betas=task.betas, eps=task.eps, fused=task.dtype is not torch.float32)
    before = weights
    for step in range(num_steps):
        before = [page.detach().clone() for page in weights]
        for page, gradient in zip(weights, task.gradients(step), strict=True):
            page.grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = task.rate_at(step)
        if task.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(weights, task.max_grad_norm)
        optimizer.step()
    return [
        {
            "values": page.detach().float(),
            "exp_avg": optimizer.state[page]["exp_avg"].float(),
            "exp_avg_sq": optimizer.state[page]["exp_avg_sq"].float(),
            "last_good": kept.float(),
        }
        for page, kept in zip(weights, before, strict=True)
    ]


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the norm of the difference, relative to the second (absolute where that is 0)."""
    return ((found.double() - wanted.double()).norm() / (wanted.double().norm() or 1.0)).item()


def assert_same(found: list[dict[str, torch.Tensor]], wanted: list[dict[str, torch.Tensor]]) -> None:
    for page, other in zip(found, wanted, strict=True):
        for part in PARTS:
            assert torch.equal(page[part], other[part]), part


def assert_as_torch(results: Results, run: str, name: str, tolerance: float = 1e-6) -> None:
    task = results.runs[run].tasks[name]
    wanted = expected(task, results.runs[run].num_steps)
    for found, page in zip(results.pages(run, name), wanted, strict=True):
        for part, tensor in page.items():
            assert relative(found[part], tensor) < tolerance, part
        assert (found["gradient"] == 0).all()


@needs_triton
@pytest.mark.parametrize("name", TASKS)
def test_five_steps_of_a_task_among_others_are_those_of_its_own_adamw(results: Results, name: str) -> None:
    assert_as_torch(results, "together", name)


@needs_triton
@pytest.mark.parametrize("name", CROWD)
def test_every_one_of_many_pages_is_found_by_its_programs(results: Results, name: str) -> None:
    assert_as_torch(results, "crowd", name, 1e-5)  # a single weight may end near 0, far from where it began


@needs_triton
@pytest.mark.parametrize("name", TASKS)
def test_a_task_has_the_same_bits_alone_and_in_company(results: Results, name: str) -> None:
    assert_same(results.pages(f"{name} alone", name), results.pages("together", name))


@needs_triton
@pytest.mark.parametrize(("verdict", "name"), list(zip(BROKEN, TASKS, strict=False)))
def test_a_task_that_is_not_finite_keeps_its_bits_and_the_others_step(
    results: Results, verdict: str, name: str
) -> None:
    run = f"{verdict} of {name}"
    task = TASKS[name]
    for found, weights, gradient in zip(results.pages(run, name), task.weights(), task.gradients(0), strict=True):
        assert torch.equal(found["values"], weights)
        assert torch.equal(found["gradient"], gradient)
        assert not any(found[part].any() for part in ("exp_avg", "exp_avg_sq", "last_good"))
    for other in TASKS.keys() - {name}:
        assert_same(results.pages(run, other), results.pages("one step", other))


@needs_triton
def test_the_copy_holds_the_weights_from_before_the_step(results: Results) -> None:
    for name, task in TASKS.items():
        for found, weights in zip(results.pages("one step", name), task.weights(), strict=True):
            assert torch.equal(found["last_good"], weights)
            assert not torch.equal(found["values"], weights)


@needs_triton
@pytest.mark.parametrize(("name", "tolerance"), [("fp32", 1e-6), ("fp16", 1e-3), ("bf16", 3e-2)])
def test_pages_of_several_dtypes_step_in_one_call(results: Results, name: str, tolerance: float) -> None:
    # both compute in fp32 and round what they store; the interpreter rounds bf16 towards zero
    assert_as_torch(results, "dtypes", name, tolerance)


@needs_triton
@pytest.mark.parametrize("name", ["block and one", "two pages"])
def test_addresses_that_are_no_multiple_of_sixteen_bytes_give_the_same_bits(results: Results, name: str) -> None:
    assert_same(results.pages("shifted", name), results.pages("together", name))


@needs_triton
def test_a_limit_binds_in_some_steps_and_not_in_others() -> None:
    for name in ("block", "two pages"):
        norms = [torch.cat(TASKS[name].gradients(step)).norm() for step in range(NUM_STEPS)]
        assert norms[0] < TASKS[name].max_grad_norm < norms[-1]


# ------------------------------------------------------------------------------ refusals

BAD_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "float64": ({"dtype": torch.float64}, "allowed: one dtype of bf16, fp16 and fp32"),
    "short moment": ({"short": "exp_avg"}, "one size"),
    "gradient of another dtype": ({"half": "gradient"}, "one dtype"),
    "elements apart": ({"apart": "last_good"}, "not contiguous"),
    "unknown task": ({"task": 2}, "allowed: 0 to 1"),
    "one row of verdicts": ({"verdicts": torch.ones(1, 2)}, "allowed: contiguous [2, tasks]"),
    "bf16 verdicts": ({"verdicts": torch.ones(2, 2, dtype=torch.bfloat16)}, "allowed: float32"),
}


def complain() -> None:
    """In the child: print what every bad call is refused with."""
    from peft_mux.kernels.adamw.device import multi_adamw_
    from peft_mux.kernels.adamw.pages import PageUpdate

    messages = {}
    for name, (spec, _) in BAD_CALLS.items():
        tensors = {part: torch.zeros(8, dtype=spec.get("dtype", torch.float32)) for part in PARTS}
        if "short" in spec:
            tensors[spec["short"]] = torch.zeros(7)
        if "half" in spec:
            tensors[spec["half"]] = torch.zeros(8, dtype=torch.bfloat16)
        if "apart" in spec:
            tensors[spec["apart"]] = torch.zeros(16)[::2]
        settings = {"rate": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 0.0}
        page = PageUpdate(**tensors, task=spec.get("task", 0), step=1, **settings)
        try:
            multi_adamw_([page], spec.get("verdicts", torch.ones(2, 2)))
            messages[name] = "accepted"
        except ValueError as error:
            messages[name] = str(error)
    print(json.dumps(messages))


@pytest.fixture(scope="module")
def complaints() -> dict[str, str]:
    return json.loads(run_script(__file__, "complain", TRITON_INTERPRET="1"))


@needs_triton
@pytest.mark.parametrize("name", BAD_CALLS)
def test_what_the_kernel_cannot_take_is_refused_by_name(complaints: dict[str, str], name: str) -> None:
    assert BAD_CALLS[name][1] in complaints[name]


# ------------------------------------------------------------------------------ compilation

COMPILED = [(dtype, is_aligned) for dtype in DTYPES for is_aligned in (True, False)]


def compile_for_sm90() -> None:
    """In the child: compile without a device and print what the assembler says about registers and stack."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from peft_mux.kernels.adamw import device as module

    kernel = module.multi_adamw_kernel
    types = {"table_ptr": "*i64", "settings_ptr": "*fp32", "verdicts_ptr": "*fp32"}
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    report = {}
    for dtype, is_aligned in COMPILED:
        constants = {"DTYPE": module.DTYPES[DTYPES[dtype]], "BLOCK": module.BLOCK, "ALIGNED": is_aligned}
        names = kernel.arg_names
        source = ASTSource(
            fn=kernel,
            signature={name: "constexpr" if name in constants else types.get(name, "i32") for name in names},
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={(names.index(name),): [["tt.divisibility", 16]] for name in types},
        )
        target, options = GPUTarget("cuda", 90, 32), {"num_warps": module.NUM_WARPS}
        compiled = triton.compile(source, target=target, options=options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            usage, listing = (
                subprocess.run([str(tool), what, file.name], capture_output=True, text=True, check=True).stdout
                for what in ("--dump-resource-usage", "--dump-sass")
            )
        found = {key.lower(): int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
        found["wide loads"] = len(re.findall(r"LDG\.E\S*\.128", listing))
        found["wide stores"] = len(re.findall(r"STG\.E\S*\.128", listing))
        found["atomics"] = len(re.findall(r"\b(?:RED|ATOM)G?\.", listing))
        report[f"{dtype} {is_aligned}"] = found
    print(json.dumps(report))


@needs_triton
def test_the_kernel_compiles_for_sm_90_without_spills_and_with_wide_accesses(tmp_path: Path) -> None:
    report = json.loads(run_script(__file__, "compile", TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path)))
    assert len(report) == len(COMPILED)
    for name, found in report.items():
        assert (found["stack"], found["local"], found["atomics"]) == (0, 0, 0), name
    for dtype in DTYPES:
        found = report[f"{dtype} True"]
        assert found["reg"] <= 85, dtype  # three programs of 256 threads on a multiprocessor
        # of four tensors in, of five out; a thread has eight elements of each
        words = 8 * (4 if dtype == "fp32" else 2) // 16
        assert (found["wide loads"], found["wide stores"]) == (4 * words, 5 * words), dtype


@pytest.mark.gpu
@needs_triton
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_the_steps_are_those_of_torch_and_a_task_has_the_same_bits_alone(tmp_path: Path) -> None:
    path = str(tmp_path / "results.npz")
    run_cases(path, "cuda")
    found = Results(path)
    for name in TASKS:
        assert_as_torch(found, "together", name)
        assert_same(found.pages(f"{name} alone", name), found.pages("together", name))


if __name__ == "__main__":
    if sys.argv[1] == "cases":
        keep_patches()
    {"cases": lambda: run_cases(sys.argv[2]), "complain": complain, "compile": compile_for_sm90}[sys.argv[1]]()
