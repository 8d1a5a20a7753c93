"""Forms of training on the pretended device: architectures, dtypes, chains, captured passes, old cards, optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.pretended_cuda.checks import assert_on_kernels, assert_trains_without_waiting, seen_of

pytestmark = pytest.mark.timeout(900)  # of seconds on an idle machine; a busy one takes longer
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    # Layers that lie the other way round, in the form that Trainer makes of a backbone that is given as an object.
    "gpt2": {"architecture": "gpt2", "dtype": "fp32", "autocast": True},
    "chains and an adapted head": {"has_chains": True, "adapts_head": True},
    "captured under autocast": {"captured": True, "dtype": "fp32", "autocast": True},
    "upper layers, recomputed": {"has_upper": True, "checkpointing": True},
    "upper layers, captured": {"has_upper": True, "captured": True},
    "bottlenecks": {"has_bottlenecks": True},
    "captured bottlenecks": {"has_bottlenecks": True, "captured": True},
    "an old card": {"name": "Tesla T4", "capability": [7, 5], "dtype": "fp16"},
    "no driver, plain AdamW": {"has_driver": False, "optim": "adamw_torch"},
    "SGD": {"optim": "sgd"},
    "a side stream": {"on_side_stream": True},
}
ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma2", "gemma3", "gpt2", "opt", "bert")
DTYPES: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bf16"},
    "fp16": {"dtype": "fp16"},
    "fp32": {"dtype": "fp32"},
    "fp32 under autocast": {"dtype": "fp32", "autocast": True},
    "checkpointing": {"dtype": "bf16", "checkpointing": True},
}
Found = dict[str, dict[str, Any]]


@pytest.mark.nightly
@pytest.mark.parametrize("form", DTYPES)
def test_ten_architectures_train_without_waiting_in_every_dtype(run_cases: Callable[..., Found], form: str) -> None:
    found = run_cases({name: {"architecture": name, **DTYPES[form]} for name in ARCHITECTURES})
    for name in ARCHITECTURES:
        reason = "scores are soft-capped" if name == "gemma2" else None
        if form == "fp32":
            reason = "the kernel computes in bf16 or fp16, not in float32"
        assert_trains_without_waiting(seen_of(found, name), reason)
        assert_on_kernels(seen_of(found, name))


@pytest.fixture(scope="module")
def found(run_cases: Callable[..., Found]) -> Found:
    return run_cases(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_no_pass_waits_a_step_reads_once_and_attention_is_one_call(found: Found, name: str) -> None:
    reason = "the GPU is older than compute capability 8.0" if name == "an old card" else None
    assert_trains_without_waiting(seen_of(found, name), reason)
    if name not in WITHOUT_KERNELS:
        assert_on_kernels(seen_of(found, name))


@pytest.mark.slow
def test_all_tasks_step_in_one_launch_of_adamw_and_only_with_adamw(found: Found) -> None:
    assert seen_of(found, "plain")["launches"]["adamw_kernel"] == 2
    assert "adamw_kernel" not in seen_of(found, "SGD")["launches"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["captured under autocast", "upper layers, captured"])
def test_a_captured_pass_touches_nothing_on_the_host(found: Found, name: str) -> None:
    seen = seen_of(found, name)
    assert seen["num_captures"] > 0
    assert seen["unsafe"] == {}
    assert not any("passes run eagerly" in message for message in seen["said"])


@pytest.mark.slow
def test_passes_with_bottlenecks_run_eagerly_on_the_kernels_of_lora_and_the_run_says_why(found: Found) -> None:
    seen = seen_of(found, "captured bottlenecks")
    assert seen["num_captures"] == 0
    assert any("bottlenecks run behind each task's own rows" in message for message in seen["said"])
    assert seen_of(found, "bottlenecks")["launches"].keys() == seen_of(found, "plain")["launches"].keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stops"), [("plain", False), ("upper layers, recomputed", True), ("upper layers, captured", False)]
)
def test_backward_passes_stop_at_the_lowest_adapter_but_where_launches_are_replayed(
    found: Found, name: str, stops: bool
) -> None:
    assert (seen_of(found, name)["rows_left_out"] > 0) == stops


@pytest.mark.slow
def test_tables_that_a_side_stream_makes_are_complete_before_another_reads_them(found: Found) -> None:
    # Both layers have a group of q, k and v, of o, of gate and up, and of down; made once for all passes and steps.
    assert seen_of(found, "a side stream")["stream_waits"] == 8
    assert seen_of(found, "plain")["stream_waits"] == 0


@pytest.mark.slow
def test_short_rows_have_one_launch_each_way_for_a_layer(found: Found) -> None:
    seen = seen_of(found, "plain")
    num_layers, num_passes = 2, 2 * seen["num_passes"]
    for kernel in ("attention_forward_kernel", "attention_backward_kernel"):
        assert seen["launches"][kernel] == num_layers * num_passes


WITHOUT_KERNELS = {
    "an old card": "Tesla T4 has compute capability 7.5, but they need 8.0",
    "no driver, plain AdamW": "a trial kernel cannot be launched (RuntimeError: 0 active drivers",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WITHOUT_KERNELS)
def test_without_kernels_training_continues_in_torch_and_says_why(found: Found, name: str) -> None:
    seen = seen_of(found, name)
    assert seen["launches"] == {}
    (warning,) = [message for message in seen["said"] if "Triton" in message]
    assert WITHOUT_KERNELS[name] in warning


@pytest.mark.slow
@pytest.mark.parametrize("form", ["plain", "bottlenecks"])
def test_variants_of_a_kernel_differ_in_its_constants_only(found: Found, form: str) -> None:
    # Another set of tasks would otherwise compile everything again, for sizes that happen to be multiples of 16 or not.
    kinds: dict[str, set[str]] = {}
    for _, kernel, arguments, _ in seen_of(found, form)["signatures"]:
        runtime = [argument for argument in arguments if argument[1] != "constexpr"]
        kinds.setdefault(kernel, set()).add(str(runtime))
    assert {"shrink_kernel", "expand_kernel", "wgrad_kernel"} < set(kinds)
    assert all(len(kind) == 1 for kind in kinds.values()), kinds
    if form == "plain":
        assert len(seen_of(found, form)["signatures"]) == 29, "groups, widths, kinds of adapters, AdamW, short rows"
