"""A user's own function as a loss: what it may return, and that what it raises fails its task alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.errors import ConfigError
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.objectives.objective import TokenOutputs
from tests.invariants import mux_lab as lab


class _BrokenBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    @staticmethod
    def backward(ctx: Any, d_loss: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("broken backward")


def _per_token(outputs: TokenOutputs) -> torch.Tensor:
    return outputs.nll_M


BROKEN = {
    "ValueError: no reward": lambda outputs: (_ for _ in ()).throw(ValueError("no reward")),
    "RuntimeError: broken backward": lambda outputs: _BrokenBackward.apply(outputs.nll_M),
    "a tensor of shape [1, ": lambda outputs: outputs.nll_M[None],
    "DataError: the objective must return a scalar of floats, or one term": lambda outputs: None,
}


def _weighted_words(outputs: TokenOutputs) -> torch.Tensor:
    assert outputs.word_logprobs_MK is not None
    weights_MK = outputs.columns["target_weights"]
    return -(outputs.word_logprobs_MK * weights_MK).sum() / outputs.totals["target_weights"]


def test_functions_of_targets_and_of_the_words_that_rows_name_train_as_sft_does(tmp_path: Path) -> None:
    several, weights = [[5, 6]] * 4, [[1, 0.5]] * 4
    rows = [{"input_ids": [3 + row, 5, 7, 9], "target_ids": several, "target_weights": weights} for row in range(8)]
    plain = lab.small_task("plain", data_seed=1, max_steps=3, learning_rate=1e-2)
    named = replace(plain, name="named", train_dataset=rows, eval_dataset=None)
    own = [replace(plain, name="own", objective=_per_token), replace(named, name="words", objective=_weighted_words)]
    run = lab.train([plain, named, *own], tmp_path, max_tokens_per_micro_batch=32)
    lab.assert_close(run.losses["own"], run.losses["plain"], 1e-5, "own")
    lab.assert_close(run.losses["words"], run.losses["named"], 1e-5, "words")
    assert run.losses["words"][0] > run.losses["words"][2]


def test_what_a_function_raises_or_returns_wrongly_fails_its_task_alone(tmp_path: Path) -> None:
    options: dict[str, Any] = {"data_seed": 1, "max_steps": 2, "learning_rate": 1e-3}
    broken = {f"own{number}": reason for number, reason in enumerate(BROKEN)}
    tasks = [lab.small_task(name, objective=BROKEN[reason], **options) for name, reason in broken.items()]
    table = lab.train([lab.small_task("plain", **options), *tasks], tmp_path).trainer.table
    assert table["plain"].status == "succeeded"
    for name, reason in broken.items():
        assert table[name].status == "failed"
        assert "objective: " in table[name].reason
        assert reason in table[name].reason


def test_wrong_arguments_are_reported_all_at_once_with_the_nearest_names() -> None:
    with pytest.raises(ConfigError) as error:
        lab.small_task(
            "a",
            data_seed=1,
            objective="policy",
            loss_type="gpro",
            objective_args={"epsilno": 1, "beta": -1, "delta": "x"},
        )
    message = str(error.value)
    for part in ("4 things are wrong:", '"grpo"', "objective_args.epsilno", "objective_args.beta", "args.delta"):
        assert part in message


def test_token_logprobs_are_in_data_order_with_gradient() -> None:
    config = lab.small_task("a", data_seed=1).peft_config
    model = MultiTaskPeftModel(lab.tiny_llama(), {"a": config, "b": config}, verify=False)
    rows = [
        {"task": name, "input_ids": [3 + number, 5, 7, 9], "weights": [0, 1.0, 0, 2.0]}
        for number in range(2)
        for name in "ab"
    ]
    found = model.token_logprobs(ChunkPackingCollator()(rows))
    for task, outputs in found.items():
        assert outputs.sequence_counts == (2, 2)
        assert outputs.columns["weights"].tolist() == [1, 2, 1, 2]
        parts = outputs.by_sequence(outputs.logprobs_M)
        for number, part in enumerate(parts):
            ids = torch.tensor([[3 + number, 5, 7, 9]])
            logits = model.task_view(task)(input_ids=ids).logits[0].log_softmax(dim=1)
            wanted = torch.stack([logits[0, 5], logits[2, 9]])
            torch.testing.assert_close(part, wanted, rtol=1e-5, atol=1e-6)
    found["a"].nll_M.sum().backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.task_parameters("a").values())
