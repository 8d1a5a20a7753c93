"""LoRA+: a task's B, vectors and embeddings have rates of their own, as with PEFT's `create_loraplus_optimizer`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, IA3Config, LoraConfig
from peft.optimizers import create_loraplus_optimizer

from peft_mux.errors import ConfigError
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.trainer.trainer import MultiTaskTrainer
from tests.invariants import mux_lab as lab
from tests.runs import SAVING, stops_after
from tests.tasks.test_optimizer import Joint, assert_same_run

CONFIGS = {
    "all linear layers": LoraConfig(r=4, target_modules="all-linear"),
    "vectors and embeddings": LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "embed_tokens"], use_dora=True, modules_to_save=["norm"]
    ),
    "biases of B": LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_bias=True),
}


def plus(name: str, config: Any = None, **settings: Any) -> Any:
    """Return a task of LoRA+."""
    options = {"weight_decay": 0.1, "learning_rate": 2e-3, "loraplus_lr_ratio": 8.0, "lr_scheduler_type": "linear"}
    task = lab.small_task(name, data_seed=len(name), optim="adamw_torch", **{**options, **settings})
    return task if config is None else replace(task, peft_config=config)


def optimizer_of_peft(model: Any, hyper: Any) -> torch.optim.Optimizer:
    """Return PEFT's own."""
    decay = {"loraplus_weight_decay": hyper.weight_decay, "eps": hyper.adam_epsilon}
    return create_loraplus_optimizer(
        model, torch.optim.AdamW, lr=hyper.learning_rate, loraplus_lr_ratio=hyper.loraplus_lr_ratio, **decay
    )


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind == "vectors and embeddings" else pytest.mark.slow) for kind in CONFIGS]
)
def test_a_task_goes_as_with_the_optimizer_of_peft_next_to_a_plain_one(kind: str, tmp_path: Path) -> None:
    tasks = [plus("own", CONFIGS[kind]), lab.small_task("plain", data_seed=4)]
    run = lab.train(tasks, tmp_path)
    verdicts = {"own": lab.judge(run.trainer, run.trainer.tasks[0], optimizer_of=optimizer_of_peft)}
    verdicts["plain"] = lab.judge(run.trainer, run.trainer.tasks[1])
    lab.assert_as_judged(run, verdicts)


def test_optimizers_that_step_parameters_one_by_one_have_the_same_rates(tmp_path: Path) -> None:
    rates = {}

    def read(trainer: MultiTaskTrainer) -> None:
        for name in ("paged", "single"):
            optimizer: Any = trainer.table[name].optimizer
            groups = zip(optimizer.kinds, optimizer.optimizer.param_groups, strict=True)
            rates[name] = {kind: (group["initial_lr"], group["weight_decay"]) for kind, group in groups}

    config = CONFIGS["vectors and embeddings"]
    tasks = [plus("paged", config), replace(plus("single", config), optim="adafactor")]
    lab.train(tasks, tmp_path, recorder=lab.Recorder(at_begin={1: read}))
    assert rates["paged"] == rates["single"]
    assert rates["paged"] == {"lora_A": (2e-3, 0.1), "lora_embedding": (1e-6, 0.1), "lora_B": (2e-3 * 8, 0.1)}


@pytest.mark.slow
def test_a_joint_step_and_a_resumed_run_leave_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tasks() -> list[Any]:
        return [plus("own", CONFIGS["vectors and embeddings"]), plus("other", loraplus_lr_ratio=None)]

    single = lab.train(tasks(), tmp_path / "single")
    joint = Joint(monkeypatch)
    assert_same_run(lab.train(tasks(), tmp_path / "joint"), single)
    assert [len(pages) for pages in joint.steps] == [4] * 8
    first = lab.train(tasks(), tmp_path / "run", recorder=stops_after(3), **SAVING)
    second = lab.train(tasks(), tmp_path / "run", resume=True, **SAVING)
    for name, digests in single.recorder.digests.items():
        assert first.recorder.digests[name] + second.recorder.digests[name] == digests, name


@pytest.mark.slow
def test_the_ratio_may_change_when_a_run_is_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab.train([plus("own", loraplus_lr_ratio=None)], tmp_path, recorder=stops_after(3), **SAVING)
    run = lab.train([plus("own")], tmp_path, resume=True, **SAVING)
    assert run.trainer.table["own"].step == 8
    assert "loraplus_lr_ratio None -> 8.0" in capsys.readouterr().out


def test_a_model_whose_adapters_are_laid_out_is_divided_for_the_task(tmp_path: Path) -> None:
    task = plus("own")
    model = MultiTaskPeftModel(lab.tiny_llama(), {"own": task.peft_config}, seeds={"own": 1}, verify=False)
    assert_same_run(lab.train([task], tmp_path / "given", model=model), lab.train([task], tmp_path / "made"))


def test_a_ratio_without_meaning_is_refused() -> None:
    said = r"loraplus_lr_ratio must be None except with LoraConfig, whose B has its own rate, got 8\.0"
    with pytest.raises(ConfigError, match=said):
        plus("own", IA3Config(target_modules=["q_proj"], feedforward_modules=[]))
    with pytest.raises(ConfigError, match=r"loraplus_lr_ratio must be a finite number above 0.*got 0"):
        plus("own", loraplus_lr_ratio=0)
    assert plus("own", AdaLoraConfig(target_modules=["q_proj"], total_step=9)).loraplus_lr_ratio == 8.0
