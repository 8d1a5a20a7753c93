"""Every kind of adapters on layers generates what plain PEFT does, with LoRA in one batch."""

from __future__ import annotations

from pathlib import Path

import pytest
from peft import LoraConfig

from peft_mux import generate
from peft_mux.modeling.adapters.kind import AdapterKind
from tests.generation.judge import Judge, held, prompts
from tests.invariants.mux_lab import VOCABULARY, tiny_llama
from tests.modeling.adapters.test_kinds import CASES, LAYERED

TOKENS = 8


_FAST = ("LORA", "BOTTLENECK", "IA3", "OFT")
"""Of each way to run one; the others follow where slow tests run."""


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, id=kind.peft_type.value, marks=() if kind.peft_type.value in _FAST else pytest.mark.slow)
        for kind in LAYERED
    ],
)
def test_a_task_of_any_kind_next_to_lora_completes_as_plain_peft_alone(kind: AdapterKind, tmp_path: Path) -> None:
    configs = {"own": CASES[kind.peft_type].make(0), "lora": LoraConfig(r=4, target_modules="all-linear")}
    rows = {name: prompts(len(name), (7, 1, 12), VOCABULARY) for name in configs}
    model = held(tiny_llama(), configs, scale=0.2)
    found = generate(model, rows, max_new_tokens=TOKENS)
    judge = Judge(tiny_llama(), model, tmp_path)
    for name in configs:
        tokens = [one.token_ids for one in found if one.task == name]
        assert tokens == judge.completions(name, rows[name], do_sample=False, max_new_tokens=TOKENS), name
