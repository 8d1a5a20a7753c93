"""Engines over layouts of real processes train what one process trains: losses, norms, and whole states of all tasks.

Layouts are stages, shards, sharded backbones (FSDP2), replicas and mixtures of these; backbones are of every family
that can be cut. Whole trainers over layouts are in `replicas/test_layouts.py`.
"""

from __future__ import annotations

import functools
import pickle
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from peft_mux.checkpoint.task_state import TaskState
from peft_mux.errors import UnsupportedModelError
from peft_mux.parallel.families import FAILING, FAMILIES, family_of
from peft_mux.parallel.layout import parse_layout
from tests.engine import lab
from tests.engine.lab import ODD, POISONED, Case, Seen
from tests.engine.processes.cases import connected, launch, values
from tests.paths import ROOT
from tools.architectures import page

TP2, DP2 = "<2,1>", "<1,1>x2"
TIED, DEEP = ("tie_word_embeddings", True), ("num_hidden_layers", 8)
DROPS = (("embd_pdrop", 0.1), ("resid_pdrop", 0.1))
SLIDES = (("use_sliding_window", True), ("max_window_layers", 2), TIED)
BIASED = (("attention_bias", True), ("mlp_bias", True), ("num_key_value_heads", 4))
FIELDS = {"llama": (), "gpt2": DROPS, "qwen3": SLIDES}

LONG: dict[str, Any] = {"splits": True, "tasks": ("a", "c", "e"), "num_steps": 2}
SMALL: dict[str, Any] = {"tasks": ("a", "b"), "num_steps": 2}
ENDS: dict[str, Any] = {"recomputes": True, "adapts_ends": True, "fields": BIASED, "arrives": True, "num_steps": 2}


def families(kinds: Sequence[str], *layouts: str) -> dict[str, Case]:
    """Return the cases of families in layouts."""
    degrees = {"pp": "<1,2>", "tp": TP2, "fsdp": DP2, "fsdp x pp": "<1,2>x2", "tp x pp": "<2,2>"}
    return {
        f"{kind}, {one}": Case(kind, degrees[one], schedule="mux", sharded="fsdp" in one, **SMALL)
        for kind in kinds
        for one in layouts
    }


FAST = {
    "pp": Case(),
    "pp, poisoned": Case(poison=True),
    "pp, two chunks": Case(schedule="interleaved_1f1b", num_chunks=2, arrives=True),
    "pp, an update fails in a window": Case(window=True, odd=True),
    "tp, in turns": Case(layout=TP2, turns=3, **ENDS),
    "tp, GPT-2, long rows cut, dropout": Case(
        "gpt2", TP2, fields=(*DROPS, ("attn_pdrop", 0.1)), recomputes=True, **LONG
    ),
    "fsdp, poisoned, ends": Case(layout=DP2, sharded=True, adapts_ends=True, poison=True, arrives=True),
    **families(["phi3"], "pp", "tp"),
}
KINDS = {
    ("1f1b", 1): ("gpt2", "qwen3"),
    ("gpipe", 1): ("qwen3", "llama"),
    ("mux", 1): ("qwen3", "gpt2"),
    ("mux", 2): ("llama", "gpt2"),
    ("interleaved_1f1b", 2): ("qwen3", "gpt2"),
}
"""Of schedules and chunks: which backbone has whole rows, and which has long ones."""
EXTRAS: dict[str, dict[str, Any]] = {"whole rows": {}, "in a window": {"window": True}, "long rows cut": LONG}
OF_TWO = {
    **{
        f"pp, {kind}, {schedule}, {chunks}, {extra}": Case(
            kind, schedule=schedule, num_chunks=chunks, fields=FIELDS[kind], **EXTRAS[extra]
        )
        for (schedule, chunks), (of_whole, of_long) in KINDS.items()
        for extra, kind in (("whole rows", of_whole), ("in a window", of_whole), ("long rows cut", of_long))
    },
    "pp, poisoned, in a window": Case(poison=True, window=True),
    "pp, uneven, sliding": Case("mistral", layers_per_stage=(1, 3), adapts_ends=True),
    "pp, bf16": Case(schedule="mux", bf16=True),
    "pp, gpipe, limit": Case(schedule="gpipe", holds_back=True),
    "pp, recomputed, limit": Case("gpt2", schedule="mux", recomputes=True, splits=True, holds_back=True, fields=DROPS),
    "tp, recomputed, ends": Case(layout=TP2, **ENDS),
    "tp, in turns, kept": Case(layout=TP2, turns=2),
    "tp, Qwen3, tied, ends, poisoned": Case("qwen3", TP2, fields=(TIED,), adapts_ends=True, poison=True),
    "tp, Qwen3, long rows cut": Case("qwen3", TP2, splits=True, fields=(("attention_dropout", 0.1),)),
    "tp, a classifier": Case(layout=TP2, fields=(("num_labels", 3),), **SMALL),
    "pp, the task that arrives classifies": Case(classifying=("f",), arrives=True),
    "tp, a task classifies": Case(layout=TP2, classifying=("b",), **SMALL),
    "dp, a task classifies, unequal passes": Case(layout=DP2, classifying=("b",), apart=True, **SMALL),
    "fsdp, GPT-2, long rows cut, unequal passes": Case("gpt2", DP2, sharded=True, apart=True, **LONG),
    "fsdp, recomputed, unequal": Case(layout=DP2, sharded=True, adapts_ends=True, recomputes=True, apart=True),
    "fsdp, tied, a task arrives": Case(layout=DP2, sharded=True, fields=(TIED,), arrives=True),
    "fsdp, Mixtral, adapted experts": Case("mixtral", DP2, sharded=True, adapts_experts=True),
}
OF_FOUR = {
    "shards beside whole replicas": Case(layout="<2,1>, <1,1>x2"),
    "shards beside whole replicas, poisoned": Case(layout="<2,1>, <1,1>x2", poison=True),
    "stages beside shards": Case(layout="<1,2>, <2,1>"),
    "tp x pp, in turns": Case(layout="<2,2>", schedule="mux", turns=3),
    "pp4, Qwen3, two chunks": Case("qwen3", "<1,4>", schedule="interleaved_1f1b", num_chunks=2, fields=(*SLIDES, DEEP)),
    "fsdp x pp, poisoned": Case(layout="<1,2>x2", sharded=True, apart=True, poison=True, schedule="mux"),
    "fsdp x pp, uneven": Case("mistral", "<1,2>x2", sharded=True, apart=True, layers_per_stage=(1, 3)),
    **families(["phi3"], "fsdp x pp"),
}
UNLIKE = ("mixtral", "gemma2", "gpt_neox", "opt", "olmo2", "deepseek_v3", "cohere")
"""Families with experts, soft-caps, one projection for all heads, projected ends, norms over all heads, attention of
low rank, and parallel layers."""

SLOW = [OF_TWO, OF_FOUR, families(UNLIKE, "pp", "tp")]
NIGHTLY = [
    {"fsdp, tied and adapted ends": Case(layout="<1,1>x3", sharded=True, fields=(TIED,), adapts_ends=True)},
    {
        "dp x pp, two chunks": Case(layout="<1,2>x2", schedule="interleaved_1f1b", num_chunks=2),
        "tp4, GPT-2": Case("gpt2", "<4,1>"),
        "pp4, bf16": Case(layout="<1,4>", schedule="mux", bf16=True),
        "pp4, bf16, in a window": Case(layout="<1,4>", schedule="mux", bf16=True, window=True),
        "pp4, an update fails in a window": Case(layout="<1,4>", window=True, odd=True),
        "fsdp x pp, Qwen3": Case("qwen3", "<1,2>x2", sharded=True, apart=True, schedule="mux", fields=SLIDES),
    },
    families(("qwen3", "granite", "gpt_neox", "opt", "qwen3_moe"), "tp x pp"),
    *(families([kind], "pp", "tp") for kind in FAMILIES if kind not in (*UNLIKE, "phi3")),
    *(families([kind], "fsdp") for kind in FAMILIES),
    *(families([kind], "fsdp x pp") for kind in FAMILIES if kind != "phi3"),
]
MARKS = {name: pytest.mark.slow for cases in SLOW for name in cases}
MARKS |= {name: pytest.mark.nightly for cases in NIGHTLY for name in cases}
LAUNCH_OF = {name: cases for cases in (FAST, *SLOW, *NIGHTLY) for name in cases}


@pytest.fixture(scope="module", autouse=True)
def forget() -> Iterator[None]:
    yield
    alone.cache_clear()
    shown.cache_clear()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@functools.cache
def alone(case: Case, folder: Path) -> Seen:
    return lab.train(case.alone, folder)


@functools.cache
def shown(first: str, folder: Path) -> list[dict[str, Seen]]:
    """Return what each process saw of the launch that begins with a case."""
    cases = LAUNCH_OF[first]
    outcomes = launch(cases[first].world_size, lab.run_cases, cases, folder, limit_s=600)
    return [pickle.loads(value) for value in values(outcomes)]


def parts_of(name: str, folder: Path) -> list[Seen]:
    return [one[name] for one in shown(next(iter(LAUNCH_OF[name])), folder)]


def check_states(found: TaskState, expected: TaskState, task: str, *, bound: float = 1e-4) -> None:
    # AdamW magnifies the rounding errors of small gradients, which differ by processor.
    assert found.weights.keys() == expected.weights.keys()
    assert found.moments.keys() == expected.moments.keys()
    pairs = [(key, found.weights[key], weight) for key, weight in expected.weights.items()]
    for key, moments in expected.moments.items():
        pairs += [(key, found.moments[key][kind], moment) for kind, moment in moments.items()]
    for key, one, other in pairs:
        assert (one.isfinite() == other.isfinite()).all(), (task, key)
        one, other = one.nan_to_num(), other.nan_to_num()
        assert (one - other).norm() <= bound * other.norm(), (task, key)
    assert (found.settings, found.schedule) == (expected.settings, expected.schedule)


def check_as_alone(name: str, folder: Path) -> None:
    """Compare what the processes of a case saw with one another, and with one process."""
    case, parts = LAUNCH_OF[name][name], parts_of(name, folder)
    layout, one = parse_layout(case.layout), alone(case.alone, folder)
    assert len({str((part.losses, part.norms, part.failures)) for part in parts}) == 1, "the same bits on all"
    assert parts[0].failures == one.failures
    assert {task for part in parts for task in part.non_finite} == set(one.non_finite) == set(one.failures)
    for task, losses in one.losses.items():
        loose = 100 if case.bf16 else 1
        assert parts[0].losses[task] == pytest.approx(losses, rel=1e-5 * loose, nan_ok=True), task
        assert parts[0].norms[task] == pytest.approx(one.norms[task], rel=1e-4 * loose, nan_ok=True), task
        if not case.bf16:
            check_states(parts[0].states[task], one.states[task], task)  # type: ignore[arg-type]
    for task, loss in one.evaluated.items():
        replicas = [parts[rank].evaluated.get(task, 0.0) for rank in layout.leaders]
        assert sum(replicas) == pytest.approx(loss, rel=1e-5 * (100 if case.bf16 else 1)), task
    for part in parts:
        assert part.held_bytes == 0, "keys and values of long rows are freed"
        for found, wanted in zip(part.logits, one.logits or [], strict=True) if part.logits else ():
            np.testing.assert_allclose(found, wanted, atol=0.1 if case.bf16 else 1e-5)
        assert part.generated in (None, one.generated)
    assert any(part.logits for part in parts) == (case.tasks == lab.FIRST)
    if case.kind in ("llama", "gpt2"):
        for rank, part in enumerate(parts):
            size = layout.replicas[layout.place(rank).replica].num_gpus
            share = 1 / (size * layout.num_replicas if case.sharded else size)
            assert part.share < share + 0.15, "each process holds its own part of the backbone"


def params(*, is_window: bool = False) -> list[Any]:
    """Return the cases of a test: those that are not of one window, or only those."""
    found = [(name, cases[name]) for name, cases in LAUNCH_OF.items()]
    names = [name for name, case in found if case.window >= is_window and not case.odd]
    return [pytest.param(name, marks=MARKS.get(name, ())) for name in names]


@pytest.mark.distributed
@pytest.mark.parametrize("name", params())
def test_a_layout_trains_to_the_result_of_one_process(name: str, home: Path) -> None:
    check_as_alone(name, home)


@pytest.mark.distributed
@pytest.mark.parametrize("name", params(is_window=True))
def test_steps_in_a_window_have_the_bits_of_steps_that_are_flushed(name: str, home: Path) -> None:
    case = LAUNCH_OF[name][name]
    flushed = next(other for other, cases in LAUNCH_OF.items() if cases[other] == replace(case, window=False))
    for window, plain in zip(parts_of(name, home), parts_of(flushed, home), strict=True):
        assert window.failures == plain.failures
        assert window.most_in_flight > 0
        for task, losses in plain.losses.items():
            if case.poison and task == "e":  # the rows of the one that failed stay in its passes
                assert window.losses[task] == pytest.approx(losses, rel=1e-6)
                continue
            assert str(window.losses[task]) == str(losses), task
            assert str(window.norms[task]) == str(plain.norms[task]), task
            if plain.states[task] is not None:
                check_states(window.states[task], plain.states[task], task, bound=0.0)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "name",
    ["pp, an update fails in a window", pytest.param("pp4, an update fails in a window", marks=pytest.mark.nightly)],
)
def test_no_stage_steps_a_task_again_whose_update_failed_on_the_last_one_and_no_other_is_affected(
    name: str, home: Path
) -> None:
    one = alone(Case().alone, home)
    for rank, part in enumerate(parts_of(name, home)):
        is_last = rank == LAUNCH_OF[name][name].world_size - 1
        assert part.failures == {ODD: "the optimizer failed" if is_last else "non_finite: gradient norm is nan"}
        assert len(part.losses[ODD]) == (1 if is_last else 2)
        for task in one.losses.keys() - {ODD}:
            assert part.losses[task] == pytest.approx(one.losses[task], rel=1e-5)
            assert part.norms[task] == pytest.approx(one.norms[task], rel=1e-4)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "healthy"),
    [
        ("pp, poisoned", "pp"),
        pytest.param("shards beside whole replicas, poisoned", "shards beside whole replicas", marks=pytest.mark.slow),
    ],
)
def test_the_neighbours_of_a_poisoned_task_train_as_if_it_were_healthy(name: str, healthy: str, home: Path) -> None:
    for part, other in zip(parts_of(name, home), parts_of(healthy, home), strict=True):
        assert part.failures == {POISONED: "non_finite: loss is nan"}
        assert other.non_finite == []
        assert len(part.losses[POISONED]) == 2
        for task in other.losses.keys() - {POISONED}:
            # The bits are the same as long as the poisoned task has rows; without its rows the sums are other ones.
            assert part.losses[task][:2] == other.losses[task][:2], task
            assert part.norms[task][:2] == other.norms[task][:2], task
            assert part.losses[task] == pytest.approx(other.losses[task], rel=1e-6), task


def hangs(rank: int) -> None:
    """Run a step as one of two stages; the second one stands still after its first action."""
    processes = connected(2.0)
    engine = lab.Engine(lab.PLAIN, processes)
    if rank == 1:
        engine.executor.on_action = lambda action: time.sleep(11.0)  # type: ignore[attr-defined]
    with processes.together():
        engine.executor.run(engine.work(0, lab.FIRST))


@pytest.mark.slow  # it waits
@pytest.mark.distributed
def test_when_a_stage_hangs_the_other_one_says_so_within_the_time_limit() -> None:
    outcomes = launch(2, hangs)
    assert "no word from rank 1" in outcomes[0].error
    # It waits, and then asks for the error, but not until the other one wakes.
    assert 2.0 * 0.9 < outcomes[0].seconds < outcomes[1].seconds - 1.0


# ------------------------------------------------------------------- families


@pytest.mark.parametrize("kind", FAILING)
def test_a_family_that_did_not_come_through_is_refused_with_the_reason_and_what_works(kind: str) -> None:
    model = type("Backbone", (), {"config": CONFIG_MAPPING[kind]()})()
    with pytest.raises(UnsupportedModelError, match=r"cannot be cut into stages or shards, as .*shard_backbone=True"):
        family_of(model)


def test_the_page_of_architectures_is_what_the_command_writes() -> None:
    command = "python -m tools.architectures docs/architectures.md"
    assert (ROOT / "docs" / "architectures.md").read_text(encoding="utf-8") == page(), f"run {command}"
