"""What a task may say of losses of preferences: defaults read off its rows, refusals by name at construction."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, PromptTuningConfig

from peft_mux import ConfigError, Task
from peft_mux.errors import DataError
from peft_mux.modeling.objectives.task_objective import find_loss
from tests.invariants import mux_lab as lab

PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
TOKENS = {"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5, 6], "rejected_ids": [7, 8]}
ANSWER = {"prompt_ids": [1, 2], "completion_ids": [3, 4], "label": True}


def task(row: dict[str, Any], *, is_classifier: bool = False, **settings: Any) -> Task:
    config = LoraConfig(r=2, target_modules=["q_proj"], task_type="SEQ_CLS" if is_classifier else "CAUSAL_LM")
    return Task(name="a", peft_config=config, train_dataset=[row] * 4, **settings)


@pytest.mark.parametrize(
    ("columns", "is_classifier", "objective", "loss_type"),
    [
        (("prompt", "chosen", "rejected"), False, "dpo", "sigmoid"),
        (("prompt", "completion", "label"), False, "kto", "kto"),
        (("prompt", "completion"), False, "sft", "nll"),
        (("chosen", "rejected"), True, "reward", "bradley_terry"),
        (("prompt", "chosen", "rejected"), True, "reward", "bradley_terry"),
        (("text", "label"), True, "classification", "nll"),
    ],
)
def test_a_task_without_an_objective_gets_that_of_its_columns(
    columns: tuple[str, ...], is_classifier: bool, objective: str, loss_type: str
) -> None:
    made = task(dict.fromkeys(columns, "x"), is_classifier=is_classifier)
    found = find_loss(made, "task")
    assert found.objective is not None
    assert found.args is not None
    assert (found.objective.name, found.args.loss_type) == (objective, loss_type)


def test_several_losses_of_dpo_are_added_up_by_their_names() -> None:
    made = task(PAIR, loss_type=["sigmoid", "sft"], objective_args={"loss_weights": [1, 0.5]})
    args: Any = find_loss(made, "task").args
    assert (args.loss_types, args.loss_weights) == (("sigmoid", "sft"), (1.0, 0.5))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"loss_type": "sigmod"}, "tasks\\.a\\.loss_type must be.*, got 'sigmod'.*Did you mean \"sigmoid\""),
        (
            {"loss_type": "aot"},
            r"tasks\.a\.loss_type must be.*, got 'aot'.*aot is not supported: it sorts the answers of a whole batch",
        ),
        (
            {"loss_type": ["sigmoid", "sigmoid"]},
            r"tasks\.a\.loss_type must be a list with each loss once, got \[.sigmoid., .sigmoid.\]",
        ),
        ({"loss_type": "orpo"}, 'Set objective="orpo"'),
        ({"objective_args": {"beta": 0}}, r"tasks\.a\.objective_args\.beta must be a finite number above 0, got 0"),
        ({"objective_args": {"beta": float("inf")}}, r"objective_args\.beta must be a finite number above 0, got inf"),
        ({"objective_args": {"betta": 1.0}}, 'betta must be.*, got an unknown argument.*Did you mean "beta"'),
        ({"objective_args": {"rpo_alpha": 1.0}}, "TRL has taken it out"),
        ({"objective_args": {"label_smoothing": 0.6}}, "a number from 0 to 0.5"),
        ({"loss_type": "hinge", "objective_args": {"label_smoothing": 0.1}}, "which no loss here reads"),
        ({"loss_type": "robust", "objective_args": {"label_smoothing": 0.5}}, "a number below 0.5"),
        (
            {"loss_type": "exo_pair"},
            r"tasks\.a\.objective_args\.label_smoothing must be a number above 0, got 0 for the loss exo_pair",
        ),
        (
            {"objective_args": {"discopop_tau": 0.1}},
            r"tasks\.a\.objective_args\.discopop_tau must be left out.*discopop",
        ),
        ({"objective_args": {"loss_weights": [1.0, 2.0]}}, "a list of 1 numbers, one for each of loss_type"),
        (
            {"loss_type": "apo_zero", "objective_args": {"f_divergence_type": "forward_kl"}},
            r"tasks\.a\.objective_args\.f_divergence_type must be.*reverse_kl.*, got 'forward_kl' for apo_zero",
        ),
        (
            {"objective_args": {"f_alpha_divergence_coef": 0.2}},
            r"objective_args\.f_alpha_divergence_coef must be .*f_divergence_type .*'alpha_divergence'",
        ),
        ({"objective_args": {"ld_alpha": 1.5}}, r"ld_alpha must be a number from 0 to 1, got 1\.5"),
        ({"loss_type": "sft", "objective_args": {"ld_alpha": 0.5}}, "which sft does not read"),
        (
            {"objective": "reward"},
            r"tasks\.a\.objective must be one of sft, .*dpo.*got 'reward' for language-model tasks",
        ),
    ],
)
def test_what_a_loss_cannot_take_is_refused_by_name(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        task(PAIR, **{"objective": "dpo", **settings})


def test_what_a_reward_cannot_take_is_refused_by_name() -> None:
    for settings, match in (
        ({"objective": "dpo"}, r"tasks\.a\.objective must be one of classification, reward, got 'dpo'"),
        ({"objective": "reward", "num_labels": 2}, "num_labels must be 1 or None with the objective reward, got 2"),
        (
            {"eval_dataset": [PAIR], "compute_metrics": lambda prediction: {}},
            "compute_metrics must be None with this objective, .*Its evaluations report eval_loss, eval_mean_reward",
        ),
    ):
        with pytest.raises(ConfigError, match=match):
            task(PAIR, is_classifier=True, **settings)


def test_rows_without_the_columns_of_the_loss_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"train_dataset must have the columns chosen_ids \+ rejected_ids; .*, got columns input_ids",
    ):
        lab.make_trainer([task({"input_ids": [1, 2, 3]}, objective="dpo")], tmp_path)
    with pytest.raises(
        DataError,
        match=r"must have the columns .*prompt_ids \+ completion_ids \+ label.*, got columns prompt_ids, ",
    ):
        lab.make_trainer([task(TOKENS, objective="kto")], tmp_path)


def test_kto_needs_two_rows_a_batch_where_it_compares_them(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"tasks\.a\.train_batch_size must be at least 2, because each prompt .*, got 1",
    ):
        lab.make_trainer([task(ANSWER, objective="kto", train_batch_size=1)], tmp_path)
    single = task(ANSWER, objective="kto", loss_type="apo_zero_unpaired", train_batch_size=1, max_steps=1)
    assert lab.train([single], tmp_path).losses["a"] == [0.5]


def test_rewards_are_zero_before_the_first_step_and_count_from_references_that_rows_bring(tmp_path: Path) -> None:
    options: dict[str, Any] = {"objective": "dpo", "train_batch_size": 2, "max_steps": 1}
    brought = task({**TOKENS, "ref_chosen_logps": -20.0, "ref_rejected_logps": -10.0}, **options)
    tasks = [task(TOKENS, **options), replace(brought, name="brought")]
    states = lab.train(tasks, tmp_path, logging_strategy="steps", logging_steps=1).trainer.task_states
    own, other = (next(entry for entry in states[name].log_history if "loss" in entry) for name in ("a", "brought"))
    assert own["loss"] == pytest.approx(0.693147, rel=1e-5)
    assert (own["rewards/chosen"], own["rewards/margins"], own["rewards/accuracies"]) == (0.0, 0.0, 0.0)
    assert own["logps/chosen"] < 0
    assert other["rewards/chosen"] == pytest.approx(0.1 * (other["logps/chosen"] + 20.0), rel=1e-5)
    assert other["rewards/rejected"] == pytest.approx(0.1 * (other["logps/rejected"] + 10.0), rel=1e-5)


def test_a_prompt_has_no_reference_but_what_rows_bring(tmp_path: Path) -> None:
    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ConfigError, match="must be a loss without a reference with PromptTuningConfig, got dpo"):
        Task(name="a", peft_config=prompt, train_dataset=[TOKENS], objective="dpo")
    rows = [{**TOKENS, "ref_chosen_logps": None, "ref_rejected_logps": None}] * 4
    made = Task(name="a", peft_config=prompt, train_dataset=rows, objective="dpo", max_steps=1)
    with pytest.raises(
        DataError, match=r"row 0 column ref_chosen_logps must be a value.*, got no such column, or None"
    ):
        lab.train([made], tmp_path)
