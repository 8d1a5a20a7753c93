"""TRL's trainers compared with this package: the same rows, order and seed give the same losses, metrics and adapters.

Losses of every step and final weights agree within 1e-4, in fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import pytest

from peft_mux.modeling.objectives.objective import OBJECTIVES, default_args
from peft_mux.task import Task
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
KEEP_END = {"max_length": 10, "truncation_mode": "keep_end"}
MARGINS = [{**row, "margin": 0.1 * place} for place, row in enumerate(lab.pairs())]


class Case(NamedTuple):
    """A run of both: TRL's trainer and its arguments, the task's settings, and the metrics that both log.

    The last rows are held out, in whole batches: of a smaller last one, TRL takes metrics for as much as of the others.
    And in one batch where a part of the loss is a mean over tokens: TRL takes it by batch, this package over all rows.
    """

    trainer: str
    rows: list[dict[str, Any]]
    options: Mapping[str, Any]
    settings: Mapping[str, Any]
    metrics: tuple[str, ...] = ()
    is_classifier: bool = False
    held_out: int = 0


def dpo(loss_type: Any, **options: Any) -> Case:
    settings = {"objective": "dpo", "loss_type": loss_type, "objective_args": options}
    return Case("DPO", lab.pairs(), {"loss_type": loss_type, **options}, settings, PAIR_METRICS)


def cpo(loss_type: str, **options: Any) -> Case:
    settings = {"objective": "cpo", "loss_type": loss_type, "objective_args": options}
    metrics = PAIR_METRICS if options.get("cpo_alpha") == 0 else (*PAIR_METRICS, "nll_loss")
    return Case("CPO", lab.pairs(), {"loss_type": loss_type, **options}, settings, metrics)


def kto(loss_type: str, rows: list[dict[str, Any]], **options: Any) -> Case:
    settings = {"objective": "kto", "loss_type": loss_type, "objective_args": options}
    return Case("KTO", rows, {"loss_type": loss_type, **options}, settings, ANSWER_METRICS)


def reward(rows: list[dict[str, Any]], **options: Any) -> Case:
    settings = {"objective": "reward", "objective_args": options}
    return Case("Reward", rows, options, settings, ("mean_reward", "accuracy", "margin"), is_classifier=True)


CASES = {
    "sft on completions": Case("SFT", COMPLETIONS, {}, {}),
    "sft in whole batches": Case(
        "SFT", COMPLETIONS[:10], {"dataloader_drop_last": True}, {"dataloader_drop_last": True}
    ),
    "sft packed": Case(
        "SFT", COMPLETIONS, {"packing": True, "max_length": 24}, {"packing": True, "max_length": 24}, held_out=4
    ),
    "sft on what the assistant says": Case(
        "SFT", MESSAGES, {"assistant_only_loss": True}, {"assistant_only_loss": True}
    ),
    # With its usual epsilon, AdamW turns small gradients, which are mostly rounding, into steps of full size.
    "dft": Case("SFT", COMPLETIONS, *[{"loss_type": "dft", "adam_epsilon": 1e-6}] * 2),
    # Of two batches of held-out pairs, `compute_metrics` gets the rows in the same order.
    "dpo": Case(
        "DPO",
        lab.pairs(),
        {"compute_metrics": lab.answer_metrics},
        {"objective": "dpo", "compute_metrics": lab.answer_metrics},
        (*PAIR_METRICS, "rows", "ids", "words"),
        held_out=8,
    ),
    "dpo on chats": dpo("sigmoid", beta=0.3)._replace(rows=CHATS),
    "dpo cut to 10 tokens": Case(
        "DPO", lab.pairs(), {"max_length": 10}, {"objective": "dpo", "max_length": 10}, PAIR_METRICS
    ),
    "dpo cut to its last 10 tokens": Case("DPO", lab.pairs(), KEEP_END, {"objective": "dpo", **KEEP_END}, PAIR_METRICS),
    "sft on the last 10 tokens": Case("SFT", COMPLETIONS, KEEP_END, KEEP_END),
    "ipo": dpo("ipo", beta=0.2),
    "hinge": dpo("hinge", beta=0.5),
    "robust": dpo("robust", label_smoothing=0.2),
    "apo_zero": dpo("apo_zero"),
    "sigmoid and sft, longer answers weighed less": dpo(["sigmoid", "sft"], loss_weights=[1.0, 0.2], ld_alpha=0.3),
    "forward_kl": dpo("sigmoid_norm", f_divergence_type="forward_kl", beta=0.5),
    "cpo": cpo("sigmoid", label_smoothing=0.1),
    "cpo on chats": cpo("hinge", beta=0.4)._replace(rows=CHATS),
    "cpo of ipo": cpo("ipo", beta=0.5, cpo_alpha=0.3),
    "simpo": cpo("simpo", beta=2.0, simpo_gamma=1.0, cpo_alpha=0.0),
    "alphapo": cpo("simpo", beta=2.5, alpha=0.25, cpo_alpha=0.0),
    "orpo": Case(
        "ORPO",
        lab.pairs(),
        {"beta": 0.3},
        {"objective": "orpo", "objective_args": {"beta": 0.3}},
        (*PAIR_METRICS, "nll_loss", "log_odds_ratio", "log_odds_chosen"),
        held_out=4,
    ),
    "kto": kto("kto", lab.answers(), beta=0.5, desirable_weight=1.2, undesirable_weight=0.7)._replace(held_out=8),
    # The first batches have no bad answer, and the last ones no good one.
    "kto on pairs": kto("kto", lab.pairs(9), beta=0.5),
    "apo_zero_unpaired": kto("apo_zero_unpaired", lab.answers(), beta=0.5),
    "reward": reward(lab.pairs())._replace(held_out=8),
    "reward with margins": reward(MARGINS, center_rewards_coefficient=0.05),
}


def class_of(trainer: str, kind: str) -> type[Any]:
    from trl.experimental import cpo, orpo

    return getattr({"CPO": cpo, "ORPO": orpo}.get(trainer, trl), f"{trainer}{kind}")


def task_of(name: str, case: Case, **settings: Any) -> Task:
    held_out = {"eval_dataset": case.rows[-case.held_out :]} if case.held_out else {}
    return lab.task(name, case.rows, is_classifier=case.is_classifier, **case.settings, **held_out, **settings)


@cache
def theirs(name: str, start: Path | None = None) -> lab.Outcome:
    """Return what TRL's trainer makes of a case."""
    case = CASES[name]
    trainer, config = (class_of(case.trainer, kind) for kind in ("Trainer", "Config"))
    held_out = case.rows[-case.held_out :] if case.held_out else []
    own: dict[str, Any] = {"is_classifier": case.is_classifier, "held_out": held_out, "start": start}
    with TemporaryDirectory() as folder:
        return lab.trl_outcome(trainer, config, case.rows, Path(folder), **own, **case.options)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "dpo" else pytest.mark.slow) for name in CASES]
)
def test_a_task_trains_as_with_the_trainer_of_trl(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    ours = lab.our_outcomes([task_of("a", case)], tmp_path, is_classifier=case.is_classifier)["a"]
    lab.assert_same(ours, theirs(name), case.metrics)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo", "kto", "sft on completions"])
def test_a_task_that_begins_from_an_adapter_has_it_as_its_reference_as_with_the_trainer_of_trl(
    name: str, tmp_path: Path
) -> None:
    start = lab.trained_adapter(tmp_path / "start")
    tasks = [task_of("a", CASES[name], init_adapter=start), task_of("b", CASES["dpo"])]
    ours = lab.our_outcomes(tasks, tmp_path)
    lab.assert_same(ours["a"], theirs(name, start), CASES[name].metrics)
    lab.assert_same(ours["b"], theirs("dpo"), PAIR_METRICS)


@pytest.mark.slow
def test_tasks_of_five_losses_train_together_as_each_with_its_trainer_of_trl(tmp_path: Path) -> None:
    names = ["sft on completions", "sft packed", "sft on what the assistant says", "dpo", "ipo", "orpo", "kto"]
    # Many micro-batches, so that rows of a batch are shared out.
    tasks = [task_of(name.replace(" ", "-"), CASES[name]) for name in names]
    together = lab.our_outcomes(tasks, tmp_path, max_tokens_per_micro_batch=90)
    for name, task in zip(names, tasks, strict=True):
        lab.assert_same(together[task.name], theirs(name), CASES[name].metrics)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7, "beta": 0.1, "loss_type": "grpo"},
        {"temperature": 1.3, "entropy_coef": 0.05, "loss_type": "dapo"},
    ],
    ids=lambda options: options["loss_type"],
)
def test_a_policy_on_given_rollouts_trains_as_with_the_trainer_of_trl(options: dict[str, Any], tmp_path: Path) -> None:
    args = {name: value for name, value in options.items() if name != "loss_type"}
    rows = lab.rollouts()
    task = lab.task("a", rows, objective="policy", loss_type=options["loss_type"], objective_args=args)
    ours = lab.our_outcomes([task], tmp_path)["a"]
    expected = lab.grpo_outcome(rows, tmp_path, **options)
    lab.assert_same(ours, expected, ("entropy", "policy_loss") if "entropy_coef" in options else ("kl",))


CONFIGS = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "cpo": "CPO", "orpo": "ORPO", "reward": "Reward", "policy": "GRPO"}
"""TRL's configuration of each of our losses, whose arguments have the same names there."""
NOT_IN_TRL = {
    "classification": "a Trainer of transformers trains it",
    "token_classification": "a Trainer of transformers trains it",
    "distill": "TRL runs the teacher, whose numbers rows bring here",
    "own": "it is the task's own function",
    ("orpo", "loss_type"): "the trainer has one loss",
    ("reward", "loss_type"): "the trainer has one loss",
}


def test_all_losses_and_arguments_that_trl_has_are_compared_with_it() -> None:
    assert set(CONFIGS) | {name for name in NOT_IN_TRL if isinstance(name, str)} == set(OBJECTIVES)


@pytest.mark.parametrize("name", CONFIGS)
def test_defaults_of_a_loss_are_those_of_the_installed_trl(name: str) -> None:
    theirs = {item.name: item.default for item in fields(class_of(CONFIGS[name], "Config"))}
    theirs |= {"loss_type": "sigmoid"} if name == "dpo" else {}  # a list of this one
    for argument, default in vars(default_args(OBJECTIVES[name])).items():
        if (name, argument) in NOT_IN_TRL:
            assert argument not in theirs
        else:
            assert theirs[argument] == default, argument
