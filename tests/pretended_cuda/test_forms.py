"""Forms of training on the pretended device: chains, adapted heads, captured passes, old cards, other optimizers.

Before that packing is proven, on the device and by the kernels that a run will train with, not on the CPU. What
`test_architectures.py` asks of every architecture in every form is asked of the one here whose layers lie the other way
round, in the form that Trainer makes of a backbone that is given as an object, where the most can go wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.pretended_cuda.checks import (
    VARLEN,
    assert_as_promised,
    assert_nothing_waits,
    assert_trained,
    seen_of,
    slower_attention,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chains": {"has_chains": True},
    "adapted head": {"adapts_head": True},
    "captured": {"captured": True},
    "captured under autocast": {"captured": True, "dtype": "fp32", "autocast": True},
    "upper layers": {"has_upper": True},
    "upper layers, recomputed": {"has_upper": True, "checkpointing": True},
    "upper layers, captured": {"has_upper": True, "captured": True},
    "bottlenecks": {"has_bottlenecks": True},
    "captured bottlenecks": {"has_bottlenecks": True, "captured": True},
    "an old card": {"name": "Tesla T4", "capability": [7, 5], "dtype": "fp16"},
    "no driver, plain AdamW": {"has_driver": False, "optim": "adamw_torch"},
    "SGD": {"optim": "sgd"},
}
LOADS: dict[str, dict[str, Any]] = {
    "fp32 under autocast": {"architecture": "llama", "dtype": "fp32", "bf16": True},
    "bf16, already multiplexed": {"architecture": "llama", "dtype": "bf16", "bf16": False, "is_held_by_user": True},
}
Found = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def found(run_cases: Callable[..., Found]) -> Found:
    loads = {f"load, {name}": {**fields, "kind": "load"} for name, fields in LOADS.items()}
    return run_cases({**CASES, **loads, "gpt2": {"architecture": "gpt2", "dtype": "fp32", "autocast": True}})


@pytest.mark.parametrize("name", LOADS)
def test_packing_is_proven_where_and_in_which_precision_it_will_train(found: Found, name: str) -> None:
    seen = seen_of(found, f"load, {name}")
    built_by_user = [["cpu", "torch.bfloat16"]] if "already multiplexed" in name else []
    assert seen["probes"] == [*built_by_user, ["cuda", "torch.bfloat16"]]
    assert seen["device"] == "cuda"


@pytest.mark.parametrize("name", LOADS)
def test_the_proof_goes_through_flash_attention_and_the_kernels(found: Found, name: str) -> None:
    seen = seen_of(found, f"load, {name}")
    # Two layers, packed without and with adapters; then the last of them, for all rows and for some.
    assert seen["attention"][VARLEN] == 6
    assert seen["launches"]["shrink_kernel"] > 0
    assert seen["launches"]["expand_kernel"] > 0


def test_an_architecture_trains_without_a_wait(found: Found) -> None:
    assert_as_promised(seen_of(found, "gpt2"), "gpt2", "fp32 under autocast")


@pytest.mark.parametrize("name", CASES)
def test_no_pass_waits_and_a_step_reads_once(found: Found, name: str) -> None:
    seen = seen_of(found, name)
    assert_trained(seen)
    assert_nothing_waits(seen)


@pytest.mark.parametrize("name", [name for name in CASES if name != "an old card"])
def test_attention_is_one_call_for_all_sequences(found: Found, name: str) -> None:
    seen = seen_of(found, name)
    assert slower_attention(seen) == []
    assert seen["attention"][VARLEN] > 0


@pytest.mark.parametrize("name", ["captured", "captured under autocast"])
def test_a_captured_pass_touches_nothing_on_the_host(found: Found, name: str) -> None:
    seen = seen_of(found, name)
    assert seen["num_captures"] > 0
    assert seen["unsafe"] == {}
    assert not any("passes run eagerly" in message for message in seen["said"])


def test_passes_with_bottlenecks_run_eagerly_and_the_run_says_why(found: Found) -> None:
    seen = seen_of(found, "captured bottlenecks")
    assert seen["num_captures"] == 0
    assert any("bottlenecks run behind each task's own rows" in message for message in seen["said"])


@pytest.mark.parametrize("name", [name for name in CASES if "upper" in name or name == "plain"])
def test_backward_passes_stop_at_the_lowest_adapter_but_where_launches_are_replayed(found: Found, name: str) -> None:
    stops = "upper" in name and "captured" not in name
    assert (seen_of(found, name)["rows_left_out"] > 0) == stops


def test_an_old_card_computes_without_kernels_and_says_why(found: Found) -> None:
    seen = seen_of(found, "an old card")
    assert seen["launches"] == {}
    (warning,) = [message for message in seen["said"] if "Triton" in message]
    assert "Tesla T4 has compute capability 7.5, but they need 8.0" in warning
    assert slower_attention(seen) == ["the GPU is older than compute capability 8.0"]


def test_without_a_driver_training_continues_in_torch_and_says_why(found: Found) -> None:
    seen = seen_of(found, "no driver, plain AdamW")
    assert seen["launches"] == {}
    (warning,) = [message for message in seen["said"] if "Triton" in message]
    assert "a trial kernel cannot be launched (RuntimeError: 0 active drivers" in warning


def test_bottlenecks_run_on_the_kernels_of_lora(found: Found) -> None:
    seen, plain = seen_of(found, "bottlenecks"), seen_of(found, "plain")
    assert seen["launches"].keys() == plain["launches"].keys()


@pytest.mark.parametrize("form", ["plain", "bottlenecks"])
def test_variants_of_a_kernel_differ_in_its_constants_only(found: Found, form: str) -> None:
    # Another set of tasks would otherwise compile everything again, for sizes that happen to be multiples of 16 or not.
    kinds: dict[str, set[str]] = {}
    for _, kernel, arguments, _ in seen_of(found, form)["signatures"]:
        runtime = [argument for argument in arguments if argument[1] != "constexpr"]
        kinds.setdefault(kernel, set()).add(str(runtime))
    assert {"shrink_kernel", "expand_kernel", "wgrad_kernel"} < set(kinds)
    assert all(len(kind) == 1 for kind in kinds.values()), kinds


def test_a_model_of_three_widths_with_every_kind_of_adapter_compiles_29_variants(found: Found) -> None:
    assert len(seen_of(found, "plain")["signatures"]) == 29
