"""Tensor parallel ranks sum no gradients that no adapter further down needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from peft_mux.engine.tensor import parallel
from tests.engine.pipeline.test_depth import LOWEST, NUM_LAYERS, batch_of, whole_model

TOKENS_OF_A_TASK = 24


class Doubling:
    """Links of a rank whose only peer computes what it does; the heights of all that is summed are noted."""

    index, size = 0, 2

    def __init__(self) -> None:
        self.heights: list[int] = []

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        self.heights.append(len(tensor.reshape(-1, tensor.shape[-1])))
        tensor.mul_(2)
        return self

    def wait(self) -> None:
        """Do nothing: it is there."""


def pass_of(names: tuple[str, ...], *, recomputes: bool = False) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Return the heights of the sums of a backward pass from the last layer's output, and the gradients."""
    model, links = whole_model(), Doubling()
    if recomputes:
        model.activation_checkpointing_enable()
    parallel.TensorParallelModel(model, links)  # type: ignore[arg-type]
    model.prepare_pass(names)
    batch = batch_of(names)
    with model.multiplexing(batch):
        output_TD = model.hidden_states(batch)
    links.heights.clear()
    output_TD.backward(torch.ones_like(output_TD))
    found = {
        f"{name} {key}": weight.grad.clone()
        for name in names
        for key, weight in model.task_parameters(name).items()
        if weight.grad is not None
    }
    return links.heights, found


@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("names", [("whole", "upper"), ("upper", "second", "last"), tuple(LOWEST)], ids=str)
def test_sums_are_made_for_the_rows_of_tasks_that_have_adapters_further_down(
    names: tuple[str, ...], recomputes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    heights, found = pass_of(names, recomputes=recomputes)
    monkeypatch.setattr(parallel, "rows_needed_now", lambda stream, num_rows: None)
    plain_heights, wanted = pass_of(names, recomputes=recomputes)
    assert set(plain_heights) == {TOKENS_OF_A_TASK * len(names)}
    assert sum(heights) < sum(plain_heights)
    assert found.keys() == wanted.keys()
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[key], rtol=1e-5, atol=1e-8)


def test_a_layer_sums_once_for_each_task_at_each_block_above_its_lowest_adapter() -> None:
    heights, _ = pass_of(("whole", "upper"))
    # Two blocks a layer, from the top: of both tasks down to the MLP of layer 2, of one down to the MLP of layer 0.
    both, one = 2 * TOKENS_OF_A_TASK, TOKENS_OF_A_TASK
    assert heights == [both, both, both, *[one] * 4]
    assert len(heights) == 2 * NUM_LAYERS - 1, "nothing wants the gradient of what flows into the first layer"
