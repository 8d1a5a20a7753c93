"""The policy losses compared with TRL's own computation, on fixed rollouts: loss, gradient and metrics."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peft_mux.losses.policy import PolicyArgs
from peft_mux.modeling.objectives.objective import OBJECTIVES, TokenOutputs, read_args

COUNTS = (3, 7, 1, 5)
"""Completion tokens of each rollout."""


def rollouts() -> dict[str, torch.Tensor]:
    """Return padded `[B, T]` numbers of rollouts, and the mask of their completions."""
    torch.manual_seed(0)
    shape = len(COUNTS), max(COUNTS)
    mask = (torch.arange(shape[1]) < torch.tensor(COUNTS)[:, None]).long()
    logprobs = -torch.rand(shape) * 3
    return {
        "mask": mask,
        "logprobs": logprobs,
        "old": logprobs + 0.4 * torch.randn(shape),
        "reference": logprobs + 0.3 * torch.randn(shape),
        "advantages": torch.randn(shape[0]),
    }


def by_trl(trainer_class: Any, values: dict[str, torch.Tensor], logprobs: torch.Tensor, args: PolicyArgs) -> Any:
    """Return TRL's loss of one batch, and the metrics that it logs."""
    trainer = SimpleNamespace(
        args=SimpleNamespace(delta=args.delta, use_bias_correction_kl=args.use_bias_correction_kl),
        loss_type="dapo" if args.loss_type == "ppo" else args.loss_type,
        beta=args.beta,
        epsilon_low=args.epsilon,
        epsilon_high=args.high,
        importance_sampling_level=args.importance_sampling_level,
        max_completion_length=args.max_completion_length,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=args.entropy_coef != 0,
        entropy_coef=args.entropy_coef,
        use_adaptive_entropy=False,
        model=SimpleNamespace(training=False),
        _metrics={"eval": defaultdict(list)},
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, logprobs.exp(), None),
    )
    ids = torch.zeros_like(values["mask"])
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": values["mask"],
        "advantages": values["advantages"],
        "old_per_token_logps": values["old"],
        "ref_per_token_logps": values["reference"],
        "num_items_in_batch": values["mask"].sum(),
    }
    loss = trainer_class._compute_loss(trainer, None, inputs)
    return loss, {name: found[0] for name, found in trainer._metrics["eval"].items()}


def outputs_of(values: dict[str, torch.Tensor], logprobs: torch.Tensor) -> TokenOutputs:
    """Return the same rollouts as this package's losses read them."""
    chosen = values["mask"].bool()
    advantages = values["advantages"][:, None].expand_as(logprobs)
    columns = {"old_logprobs": values["old"], "ref_logprobs": values["reference"], "advantages": advantages}
    return TokenOutputs(
        task="a",
        step=0,
        loss_weight=1 / len(COUNTS),
        nll_M=-logprobs[chosen],
        sequence_counts=COUNTS,
        row_sequences=(1,) * len(COUNTS),
        columns={name: column[chosen] for name, column in columns.items()},
        entropy_M=logprobs[chosen].exp(),  # any function of the same numbers
        totals={"num_rows": float(len(COUNTS)), "num_target_tokens": float(sum(COUNTS))},
    )


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dapo", "dr_grpo", "cispo", "ppo"])
def test_loss_gradient_and_metrics_are_those_of_trl(loss_type: str, beta: float, level: str) -> None:
    trainer_class = pytest.importorskip("trl", reason="TRL, the judge of this test, is not installed").GRPOTrainer
    given: dict[str, Any] = {"beta": beta, "importance_sampling_level": level, "epsilon": 0.15, "epsilon_high": 0.25}
    given |= {"max_completion_length": 9} if loss_type == "dr_grpo" else {}
    given |= {"epsilon_high": 1.1} if loss_type == "cispo" else {"delta": 1.6}
    given |= {"use_bias_correction_kl": False} if beta and loss_type in ("bnpo", "cispo") else {}
    given |= {"entropy_coef": 0.05} if loss_type in ("dapo", "dr_grpo") else {}
    args, faults = read_args(PolicyArgs, given, loss_type, "objective_args")
    assert args is not None, faults
    values = rollouts()
    theirs_BT, mine_BT = (values["logprobs"].clone().requires_grad_() for _ in range(2))
    wanted, metrics = by_trl(trainer_class, values, theirs_BT, args)
    found = OBJECTIVES["policy"].loss(outputs_of(values, mine_BT), args)
    torch.testing.assert_close(found.loss, wanted, rtol=1e-5, atol=1e-7)
    wanted.backward()
    found.loss.backward()
    chosen = values["mask"].bool()
    assert theirs_BT.grad is not None
    assert mine_BT.grad is not None
    torch.testing.assert_close(mine_BT.grad[chosen], theirs_BT.grad[chosen], rtol=1e-5, atol=1e-7)
    names = OBJECTIVES["policy"].statistic_names(args)
    assert set(metrics) - set(names) <= {"entropy", "clip_ratio/low_min", "clip_ratio/high_max"}
    assert found.statistics is not None
    for name, value in zip(names, found.statistics.tolist(), strict=True):
        assert value == pytest.approx(metrics[name], rel=1e-5, abs=1e-7), name
    assert level == "sequence" or any(value > 0 for value in found.statistics.tolist())
