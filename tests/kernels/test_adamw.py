"""Joint AdamW steps and norms in torch's multi-tensor operations: the bits of torch, task by task."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from peft_mux.kernels.adamw import PageUpdate, foreach_update, joint_update, total_norms

TASKS: dict[str, dict[str, Any]] = {
    "plain": {"rate": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 0.0},
    "decaying": {"rate": 3e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.3, "max_grad_norm": 0.5},
    "odd": {"rate": 1e-3, "betas": (0.3, 0.7), "eps": 1e-3, "weight_decay": 0.1, "max_grad_norm": 1.0},
    "later": {"rate": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "max_grad_norm": 1e6},
}
NUM_PAGES = {"plain": 1, "decaying": 2, "odd": 3, "later": 1}
FIRST_STEP = {"plain": 0, "decaying": 0, "odd": 0, "later": 40}


class Joint:
    """Tasks that step jointly, and for each the same weights under its own `torch.optim.AdamW`."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.own: dict[str, torch.optim.AdamW] = {}
        self.pages: dict[str, list[list[torch.Tensor]]] = {}
        for name in names:
            generator = torch.Generator().manual_seed(list(TASKS).index(name))
            weights = [torch.randn(50 + page, generator=generator) for page in range(NUM_PAGES[name])]
            own = [torch.nn.Parameter(page.clone()) for page in weights]
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
                parameter.grad = gradient
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
        return foreach_update(updates, both)

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


def test_cuda_has_a_joint_update_and_a_cpu_has_none() -> None:
    assert joint_update(torch.device("cpu")) is None
    assert joint_update(torch.device("cuda")) is foreach_update
    assert foreach_update([], torch.tensor([[1.0, 2.0], [3.0, 4.0]])) == [[1.0, 2.0], [3.0, 4.0]]
