"""TRL's trainers beside this package: the same rows, order and seed give the same losses, metrics and adapters.

Losses of every step and final weights agree within 1e-4, in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.trl import trl_lab as lab

trl = pytest.importorskip("trl", reason="trl is not installed")

PAIR_METRICS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)
ANSWER_METRICS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected", "kl")
MESSAGES = [
    {
        "messages": [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["chosen"].strip()},
            {"role": "user", "content": row["rejected"].strip()},
            {"role": "assistant", "content": row["prompt"]},
        ]
    }
    for row in lab.pairs()
]
COMPLETIONS = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in lab.pairs()]
CHATS = [
    {
        "prompt": [{"role": "user", "content": row["prompt"]}],
        "chosen": [{"role": "assistant", "content": row["chosen"].strip()}],
        "rejected": [{"role": "assistant", "content": row["rejected"].strip()}],
    }
    for row in lab.pairs()
]
MARGINS = [{**row, "margin": 0.1 * place} for place, row in enumerate(lab.pairs())]


class Case(NamedTuple):
    """A run of both.

    Attributes:
        trainer: name of TRL's trainer, whose arguments are of the class of the same name.
        rows: the rows.
        options: TRL's arguments.
        settings: the task's own.
        metrics: what both log, under the same names.
        is_classifier: whether the backbone is one.
    """

    trainer: str
    rows: list[dict[str, Any]]
    options: Mapping[str, Any]
    settings: Mapping[str, Any]
    metrics: tuple[str, ...] = ()
    is_classifier: bool = False


def dpo(loss_type: Any, **options: Any) -> Case:
    settings = {"objective": "dpo", "loss_type": loss_type, "objective_args": options}
    return Case("DPO", lab.pairs(), {"loss_type": loss_type, **options}, settings, PAIR_METRICS)


def kto(loss_type: str, rows: list[dict[str, Any]], **options: Any) -> Case:
    settings = {"objective": "kto", "loss_type": loss_type, "objective_args": options}
    return Case("KTO", rows, {"loss_type": loss_type, **options}, settings, ANSWER_METRICS)


def reward(rows: list[dict[str, Any]], **options: Any) -> Case:
    settings = {"objective": "reward", "objective_args": options}
    return Case("Reward", rows, options, settings, ("mean_reward", "accuracy", "margin"), is_classifier=True)


CASES = {
    "sft on completions": Case("SFT", COMPLETIONS, {}, {}),
    "sft on what the assistant says": Case(
        "SFT", MESSAGES, {"assistant_only_loss": True}, {"assistant_only_loss": True}
    ),
    "dpo": dpo("sigmoid"),
    "dpo on chats": dpo("sigmoid", beta=0.3)._replace(rows=CHATS),
    "dpo cut to 10 tokens": Case(
        "DPO", lab.pairs(), {"max_length": 10}, {"objective": "dpo", "max_length": 10}, PAIR_METRICS
    ),
    "ipo": dpo("ipo", beta=0.2),
    "hinge": dpo("hinge", beta=0.5),
    "robust": dpo("robust", label_smoothing=0.2),
    "apo_zero": dpo("apo_zero"),
    "sigmoid and sft, longer answers weighed less": dpo(["sigmoid", "sft"], loss_weights=[1.0, 0.2], ld_alpha=0.3),
    "forward_kl": dpo("sigmoid_norm", f_divergence_type="forward_kl", beta=0.5),
    "orpo": Case(
        "ORPO",
        lab.pairs(),
        {"beta": 0.3},
        {"objective": "orpo", "objective_args": {"beta": 0.3}},
        (*PAIR_METRICS, "nll_loss", "log_odds_ratio", "log_odds_chosen"),
    ),
    "kto": kto("kto", lab.answers(), beta=0.5, desirable_weight=1.2, undesirable_weight=0.7),
    # The first batches have no bad answer, and the last ones no good one.
    "kto on pairs": kto("kto", lab.pairs(9), beta=0.5),
    "apo_zero_unpaired": kto("apo_zero_unpaired", lab.answers(), beta=0.5),
    "reward": reward(lab.pairs()),
    "reward with margins": reward(MARGINS, center_rewards_coefficient=0.05),
}
FAST = "dpo"


def theirs(case: Case, folder: Path, **options: Any) -> lab.Outcome:
    from trl.experimental import orpo

    home = orpo if case.trainer == "ORPO" else trl
    trainer, config = (getattr(home, f"{case.trainer}{kind}") for kind in ("Trainer", "Config"))
    return lab.trl_outcome(
        trainer, config, case.rows, folder, is_classifier=case.is_classifier, **case.options, **options
    )


@pytest.mark.parametrize(
    "name", [name if name == FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_a_task_trains_as_with_the_trainer_of_trl(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    task = lab.task("a", case.rows, is_classifier=case.is_classifier, **case.settings)
    ours = lab.our_outcomes([task], tmp_path, is_classifier=case.is_classifier)["a"]
    expected = theirs(case, tmp_path)
    lab.assert_same(ours, expected)
    lab.assert_same_metrics(ours, expected, case.metrics)


@pytest.mark.parametrize("name", ["dpo", pytest.param("kto", marks=pytest.mark.slow), "sft on completions"])
def test_a_task_that_begins_from_an_adapter_has_it_as_its_reference_as_with_the_trainer_of_trl(
    name: str, tmp_path: Path
) -> None:
    start = lab.trained_adapter(tmp_path / "start")
    case = CASES[name]
    task = lab.task("a", case.rows, **case.settings, init_adapter=start)
    beside = lab.task("b", lab.pairs(), objective="dpo")
    ours = lab.our_outcomes([task, beside], tmp_path)
    expected = theirs(case, tmp_path, start=start)
    lab.assert_same(ours["a"], expected)
    lab.assert_same_metrics(ours["a"], expected, case.metrics)
    lab.assert_same(ours["b"], theirs(CASES["dpo"], tmp_path))


@pytest.mark.slow
def test_tasks_of_five_losses_train_together_as_each_with_its_trainer_of_trl(tmp_path: Path) -> None:
    names = ["sft on completions", "sft on what the assistant says", "dpo", "ipo", "orpo", "kto"]
    tasks = [lab.task(name.replace(" ", "-"), CASES[name].rows, **CASES[name].settings) for name in names]
    # Many micro-batches, so that rows of a batch are shared out.
    together = lab.our_outcomes(tasks, tmp_path, max_tokens_per_micro_batch=90)
    for name, task in zip(names, tasks, strict=True):
        expected = theirs(CASES[name], tmp_path / task.name)
        lab.assert_same(together[task.name], expected)
        lab.assert_same_metrics(together[task.name], expected, CASES[name].metrics)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo", "orpo", "kto", "reward"])
def test_held_out_rows_have_the_metrics_of_the_trainer_of_trl(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    # In whole batches: of a smaller last one, TRL takes metrics for as much as of the others. And in one batch where
    # a part of the loss is a mean over tokens: TRL takes it by batch, this package over all of them.
    held_out = case.rows[-4:] if name == "orpo" else case.rows[-8:]
    case = case._replace(options={**case.options, "held_out": held_out})
    settings = {**case.settings, "eval_dataset": held_out}
    task = lab.task("a", case.rows, is_classifier=case.is_classifier, **settings)
    ours = lab.our_outcomes([task], tmp_path, is_classifier=case.is_classifier)["a"].evaluated
    expected = theirs(case, tmp_path).evaluated
    for metric in ("loss", *case.metrics):
        assert ours[f"eval_{metric}"] == pytest.approx(expected[f"eval_{metric}"], rel=1e-4, abs=1e-4), metric
