"""Joint AdamW steps and norms: the bits of torch, task by task; the compiled kernel is as near to float64 as torch."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from peft_mux.kernels import adamw
from peft_mux.kernels.adamw import PageUpdate, foreach_update, joint_update, kernel_update, total_norms

TASKS: dict[str, dict[str, Any]] = {
    "plain": {"rate": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 0.0},
    "decaying": {"rate": 3e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.3, "max_grad_norm": 0.5},
    "odd": {"rate": 1e-3, "betas": (0.3, 0.7), "eps": 1e-3, "weight_decay": 0.1, "max_grad_norm": 1.0},
    "later": {"rate": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "max_grad_norm": 1e6},
}
NUM_PAGES = {"plain": 1, "decaying": 2, "odd": 3, "later": 1}
FIRST_STEP = {"plain": 0, "decaying": 0, "odd": 0, "later": 40}


class Joint:
    """Tasks that step jointly, and for each the same weights under its own `torch.optim.AdamW`.

    Args:
        names: the tasks.
        size: elements of the first page of each; the next ones have `more` more.
        more: see there.
        update: the joint update.
        dtype: of the weights under `torch.optim.AdamW`.
    """

    def __init__(
        self,
        names: list[str],
        size: int = 50,
        more: int = 1,
        update: Callable[..., list[list[float]]] = foreach_update,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.names, self.update = names, update
        self.own: dict[str, torch.optim.AdamW] = {}
        self.pages: dict[str, list[list[torch.Tensor]]] = {}
        for name in names:
            generator = torch.Generator().manual_seed(list(TASKS).index(name))
            weights = [torch.randn(size + more * page, generator=generator) for page in range(NUM_PAGES[name])]
            own = [torch.nn.Parameter(page.to(dtype, copy=True)) for page in weights]
            settings = TASKS[name]
            self.own[name] = torch.optim.AdamW(
                own, settings["rate"], settings["betas"], settings["eps"], settings["weight_decay"]
            )
            self.pages[name] = [[page, *(torch.zeros_like(page) for _ in range(4))] for page in weights]
            for page in own:
                page.grad = torch.zeros_like(page)
            rates = self.own[name].param_groups[0]
            rate, rates["lr"], decay, rates["weight_decay"] = rates["lr"], 0.0, rates["weight_decay"], 0.0
            for _ in range(FIRST_STEP[name]):
                self.own[name].step()
            rates["lr"], rates["weight_decay"] = rate, decay

    def step(self, number: int, verdicts: dict[str, tuple[float, float]] | None = None) -> list[list[float]]:
        """Take a step both ways, from the same gradients."""
        updates, gradients = [], []
        for column, name in enumerate(self.names):
            generator = torch.Generator().manual_seed(100 * number + list(TASKS).index(name))
            own = [torch.randn(len(page[0]), generator=generator) for page in self.pages[name]]
            for page, gradient, parameter in zip(self.pages[name], own, self.parameters(name), strict=True):
                page[1].copy_(gradient)
                parameter.grad = gradient.to(parameter.dtype)
                settings = {**TASKS[name], "step": FIRST_STEP[name] + number + 1}
                updates.append(PageUpdate(*page, task=column, **settings))
            gradients.append([page[1] for page in self.pages[name]])
            limit = TASKS[name]["max_grad_norm"]
            if limit:
                torch.nn.utils.clip_grad_norm_(self.parameters(name), limit)
            if not verdicts or name not in verdicts:
                self.own[name].step()
        both = torch.stack([torch.ones(len(self.names)), torch.stack(total_norms(gradients))])
        for name, verdict in (verdicts or {}).items():
            both[:, self.names.index(name)] = torch.tensor(verdict)
        return self.update(updates, both)

    def parameters(self, name: str) -> list[torch.nn.Parameter]:
        return self.own[name].param_groups[0]["params"]

    def assert_equal(self, name: str) -> None:
        for page, parameter in zip(self.pages[name], self.parameters(name), strict=True):
            state = self.own[name].state[parameter]
            assert torch.equal(page[0], parameter.detach())
            assert torch.equal(page[2], state["exp_avg"])
            assert torch.equal(page[3], state["exp_avg_sq"])
            assert not page[1].any(), "the gradient is zeroed"


def test_five_joint_steps_have_the_bits_of_each_task_s_own_adamw() -> None:
    joint = Joint(list(TASKS))
    for number in range(5):
        before = {name: [page[0].clone() for page in pages] for name, pages in joint.pages.items()}
        joint.step(number)
        for name in TASKS:
            joint.assert_equal(name)
            assert all(map(torch.equal, before[name], [page[4] for page in joint.pages[name]])), "last good"


@pytest.mark.parametrize("verdict", [(math.nan, 1.0), (-math.inf, 1.0), (1.0, math.inf), (1.0, math.nan)])
def test_tasks_that_are_not_finite_keep_their_bits_and_the_others_step(verdict: tuple[float, float]) -> None:
    joint = Joint(list(TASKS))
    joint.step(0)
    before = [[tensor.clone() for tensor in page] for page in joint.pages["decaying"]]
    outcomes = joint.step(1, {"decaying": verdict})
    assert str((outcomes[0][1], outcomes[1][1])) == str(verdict)
    for page, kept in zip(joint.pages["decaying"], before, strict=True):
        assert all(torch.equal(page[index], kept[index]) for index in (0, 2, 3, 4))
        assert page[1].any(), "its gradient is kept for inspection"
    for name in TASKS.keys() - {"decaying"}:
        joint.assert_equal(name)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(("size", "more"), [(50, 1), (2056, 2040)])
def test_the_compiled_kernel_is_as_near_to_float64_as_torch_alone_and_next_to_a_task_that_is_not_finite(
    size: int, more: int
) -> None:
    from tests.ptx.device import ptx_on_cpu

    in_torch = Joint(list(TASKS), size, more, dtype=torch.float64)
    together, alone = (Joint(names, size, more, kernel_update, torch.float64) for names in (list(TASKS), ["odd"]))
    for page in alone.pages["odd"]:
        page[4] = page[0]  # no weights from before are kept
    with ptx_on_cpu(90) as launches:
        for number in range(2):
            before = [page[0].clone() for page in together.pages["odd"]]
            kept = [[tensor.clone() for tensor in page] for page in together.pages["later"]]
            verdicts = {"later": (math.nan, 1.0)} if number else {}
            assert together.step(number, verdicts)[0][:3] == [1.0] * 3
            alone.step(number)
            in_torch.step(number, verdicts)
    assert launches.counts == {"adamw_kernel": 4}
    for page, other, values in zip(together.pages["odd"], alone.pages["odd"], before, strict=True):
        assert all(map(torch.equal, page[:4], other[:4]))
        assert torch.equal(page[4], values), "last good"
        assert not page[1].any(), "the gradient is zeroed"
    for page, tensors in zip(together.pages["later"], kept, strict=True):
        assert all(torch.equal(page[index], tensors[index]) for index in (0, 2, 3, 4))
        assert page[1].any(), "its gradient is kept for inspection"
    for name in TASKS:
        pages = zip(together.pages[name], in_torch.pages[name], in_torch.parameters(name), strict=True)
        for page, in_fp32, exact in pages:
            state = in_torch.own[name].state[exact]
            for index, right in ((0, exact.detach()), (2, state["exp_avg"]), (3, state["exp_avg_sq"])):
                errors = [float((found[index].double() - right).norm() / right.norm()) for found in (page, in_fp32)]
                assert errors[0] <= max(1.1 * errors[1], 1e-7), (name, index)


def test_norms_of_many_tasks_have_the_bits_of_each_task_s_own_norm() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [[100], [7, 3000], [1], [50, 60, 70]]
    gradients = [[torch.randn(size, generator=generator) for size in own] for own in sizes]
    gradients.append([gradients[0][0].bfloat16(), gradients[1][1]])
    gradients += [[gradients[0][0].bfloat16()], []]
    found = total_norms(gradients)
    assert len(found) == len(gradients)
    for norm, own in zip(found, gradients, strict=True):
        wanted = torch.nn.utils.get_total_norm(own)
        assert norm.dtype is wanted.dtype
        assert torch.equal(norm, wanted)
    (tiny,) = total_norms([[torch.tensor([1e-30])]])
    assert tiny.item() == pytest.approx(1e-30), "it does not vanish in its square"


@pytest.mark.parametrize(("kernels_run", "update"), [(True, kernel_update), (False, foreach_update)])
def test_cuda_has_a_joint_update_and_a_cpu_has_none(
    kernels_run: bool, update: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adamw, "runs_kernels", lambda device: kernels_run)
    assert joint_update(torch.device("cpu")) is None
    assert joint_update(torch.device("cuda")) is update
    assert foreach_update([], torch.tensor([[1.0, 2.0], [3.0, 4.0]])) == [[1.0, 2.0], [3.0, 4.0]]
