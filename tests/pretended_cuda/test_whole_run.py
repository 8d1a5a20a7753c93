"""A whole `train()` on the pretended device: what waits for the GPU where, and what is made again for each pass."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from tests.pretended_cuda.checks import seen_of

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
Run = Callable[[dict[str, dict[str, Any]]], dict[str, dict[str, Any]]]
SMALL = {"kind": "whole run", "tasks": 3, "rows": 4, "mean": 60, "steps": 6, "dtype": "fp32"}


@pytest.fixture(scope="module")
def small(run_cases: Run) -> dict[str, Any]:
    """Return what was seen of three tasks of 6 steps, the last of which arrives after the third."""
    return seen_of(run_cases({"small": dict(SMALL)}), "small")


def test_packing_is_proven_on_the_card_in_the_precision_of_passes_through_the_kernels(small: dict[str, Any]) -> None:
    ((device, dtype, num_attention, num_shrink),) = small["probes"]
    assert (device, dtype) == ("cuda", "torch.bfloat16")
    assert num_attention >= 4, "two layers, without and with adapters"
    assert num_shrink > 0


def test_all_tasks_end_on_triton_kernels_and_without_a_warning(small: dict[str, Any]) -> None:
    assert small["steps"] == {"t0": 6, "t1": 6, "t2": 6}
    assert {"shrink_kernel", "expand_kernel", "wgrad_kernel"} <= small["launches"].keys()
    assert [said for said in small["said"] if "FakeTensor" not in said] == []


def test_passes_never_wait_and_each_step_reads_once(small: dict[str, Any]) -> None:
    num_steps = 9  # six of the first two tasks, and three more of the third
    assert small["waits"].keys() == {"opening", "updates", "evaluations", "saves"}
    assert sum(small["waits"]["updates"].values()) == num_steps


def test_an_evaluation_reads_one_number_for_each_batch_and_an_ending_one_for_all_tasks(small: dict[str, Any]) -> None:
    num_evaluations, num_endings = 9, 2
    assert sum(small["waits"]["evaluations"].values()) == num_evaluations + num_endings


def test_only_weights_that_load_or_arrive_are_copied_from_memory_that_is_not_pinned(small: dict[str, Any]) -> None:
    assert small["blocking_copies"].keys() == {"opening", "arrivals"}
    num_tensors = 28  # two factors for each of the seven layers of two blocks
    assert sum(small["blocking_copies"]["arrivals"].values()) == num_tensors


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs Liger")
def test_norms_rotary_embeddings_and_mlps_are_fused_by_default(small: dict[str, Any]) -> None:
    fused = ("_rms_norm_backward_kernel", "_triton_rope", "_swiglu_backward_kernel")
    assert all(small["launches"][kernel] >= small["micro_batches"] for kernel in fused)


@pytest.mark.nightly
@pytest.mark.parametrize("cuda_graphs", [False, True])
def test_tables_and_graphs_are_made_for_few_sets_of_tasks(run_cases: Run, cuda_graphs: bool) -> None:
    case = {**SMALL, "tasks": 8, "rows": 8, "mean": 180, "steps": 20, "dtype": "bf16", "cuda_graphs": cuda_graphs}
    case["max_tokens_per_micro_batch"] = 4096  # several passes a step, of different tasks
    seen = seen_of(run_cases({"many": case}), "many")
    assert seen["waits"].keys() == {"opening", "updates", "evaluations", "saves"}
    assert seen["sets"] > 30
    assert seen["misses"] <= 12
    assert seen["captures"] <= 32
    assert (seen["captures"] > 0) == cuda_graphs
