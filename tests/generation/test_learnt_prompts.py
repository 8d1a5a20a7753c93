"""Prompts of every form with LoRA in one batch, against plain PEFT's forward on one prompt at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel

from peft_mux import DataError, generate
from tests.generation.judge import held, prompts
from tests.invariants.mux_lab import VOCABULARY, tiny_llama
from tests.modeling.adapters.prompts.prompt_cases import PROMPTS, config_of, task_ids

TOKENS = 6


def test_learnt_prompts_of_all_forms_complete_in_one_batch_as_plain_peft_alone(tmp_path: Path) -> None:
    names = [*PROMPTS, "lora"]
    model = held(tiny_llama(), {name: config_of(name) for name in names}, scale=0.1)
    rows = {name: prompts(len(name), (7, 1, 12), VOCABULARY) for name in names}
    found = generate(model, rows, max_new_tokens=TOKENS, eos_token_id=96)
    model.save_pretrained(tmp_path)
    for name in names:
        plain = PeftModel.from_pretrained(tiny_llama(), str(tmp_path / name)).eval()
        for row, one in zip(rows[name], [one for one in found if one.task == name], strict=True):
            tokens = list(row)
            for token, logprob in zip(one.token_ids, one.logprobs, strict=True):
                with torch.no_grad():
                    logits = plain(input_ids=torch.tensor([tokens]), **task_ids(plain)).logits[0, -1]
                assert int(logits.argmax()) == token, name
                assert float(logits.log_softmax(-1)[token]) == pytest.approx(logprob, abs=1e-4)
                tokens.append(token)


def test_positions_of_a_learnt_prompt_count(tmp_path: Path) -> None:
    model = held(tiny_llama(), {"prefix": config_of("prefix")})
    generate(model, {"prefix": [[3] * 50]}, max_new_tokens=9, eos_token_id=96)
    with pytest.raises(
        DataError,
        match=r"prompts\.prefix row 0 must have at most 59 tokens with its completion.*got 51",
    ):
        generate(model, {"prefix": [[3] * 51]}, max_new_tokens=9)
