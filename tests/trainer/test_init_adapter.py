"""Tasks that begin from a saved adapter, which is the reference of their losses."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftConfig, PrefixTuningConfig, get_peft_model

from peft_mux import ConfigError, Task
from peft_mux.checkpoint.records import ChangedSettingsError
from tests.engine.losses.cases import pairs
from tests.invariants import mux_lab as lab
from tests.modeling.adapters.cases import CASES_BY_NAME
from tests.runs import SAVING, assert_equal_weights, stops_after

CONFIG = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_alpha=6, task_type="CAUSAL_LM")


def saved(folder: Path, config: PeftConfig = CONFIG) -> Path:
    """Save an adapter that is not as it was drawn, with plain PEFT, and return its folder."""
    torch.manual_seed(7)
    model = get_peft_model(lab.tiny_llama(), config)
    with torch.no_grad():
        for value in [one for one in model.parameters() if one.requires_grad]:
            value.add_(0.05 * torch.randn_like(value))
    model.save_pretrained(str(folder))
    return folder


def task(name: str, start: Any, **settings: Any) -> Task:
    options: dict[str, Any] = {"objective": "dpo", "train_dataset": pairs(3, 9), "max_steps": 6, "learning_rate": 3e-3}
    return Task(name=name, init_adapter=start, train_batch_size=3, **{**options, **settings})


def test_the_reference_is_the_adapter_or_the_backbone_and_the_banner_says_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = saved(tmp_path / "start")
    tasks = [
        task("own", start),
        task("bare", start, reference="backbone"),
        task("sft", start, objective=None, train_dataset=lab.rows(2, 9, 5, 9)),
    ]
    losses = lab.train(tasks, tmp_path / "run").losses
    assert losses["own"][0] == pytest.approx(math.log(2), abs=1e-6), "at first it is its own reference"
    assert abs(losses["bare"][0] - math.log(2)) > 1e-3
    line = f"begins   own from {start}, reference: this adapter; bare from {start}, reference: the backbone; sft from"
    assert line in capsys.readouterr().out


def test_a_task_resumes_with_the_reference_that_it_began_with(tmp_path: Path) -> None:
    start = saved(tmp_path / "start")
    whole = lab.train([task("a", start)], tmp_path / "whole")
    lab.train([task("a", start)], tmp_path / "cut", recorder=stops_after(3), save_strategy="steps", save_steps=3)
    copied = shutil.copytree(start, tmp_path / "elsewhere")  # only what it holds counts
    rest = lab.train([task("a", copied)], tmp_path / "cut", resume=True, **SAVING)
    assert rest.losses["a"] == whole.losses["a"][3:]
    for other in (
        task("a", saved(tmp_path / "other", LoraConfig(**{**CONFIG.to_dict(), "lora_alpha": 7}))),
        task("a", start, reference="backbone"),
        task("a", None, peft_config=CONFIG),
    ):
        with pytest.raises(ChangedSettingsError, match=r"peft_config|init_adapter|reference"):
            lab.train([other], tmp_path / "cut", resume=True, save_strategy="steps")


def test_a_task_that_arrives_in_mid_run_begins_from_its_adapter_or_is_refused_alone(tmp_path: Path) -> None:
    start, wider = saved(tmp_path / "start"), LoraConfig(**{**CONFIG.to_dict(), "target_modules": ["q_proj"]})
    alone = lab.train([task("late", start)], tmp_path / "alone")
    refused: list[str] = []

    def arrive(trainer: Any) -> None:
        trainer.register_tasks([task("late", start)])
        trainer.register_tasks([task("odd", start, peft_config=wider)]).add_done_callback(
            lambda command: refused.append(str(command.exception()))
        )

    first = lab.small_task("first", data_seed=1)
    run = lab.train([first], tmp_path / "run", recorder=lab.Recorder(at_end={1: arrive}))
    lab.assert_close(run.losses["late"], alone.losses["late"], 1e-5, "late")
    assert run.trainer.model.tasks == ("first", "late")
    assert re.search(r"tasks\.odd\.init_adapter: .*do not match", refused[0])


def test_any_type_begins_with_the_weights_of_the_file(tmp_path: Path) -> None:
    types = ("IA3", "LOHA", "VERA", "LN_TUNING")
    configs: dict[str, PeftConfig] = {
        **{name: CASES_BY_NAME[name].make(0) for name in types},
        "prefix": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "head": LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]),
    }
    starts = {name: saved(tmp_path / name, config) for name, config in configs.items()}
    settings: dict[str, Any] = {"objective": None, "train_dataset": lab.rows(2, 9, 5, 9), "max_steps": 2}
    run = lab.train([task(name, start, **settings) for name, start in starts.items()], tmp_path / "run").trainer
    tasks = [task(name, None, peft_config=config, **settings) for name, config in configs.items()]
    reference = lab.make_trainer(tasks, tmp_path / "reference")
    for name, start in starts.items():
        reference.model.load_task(name, start)
    reference.train()
    for name in configs:
        assert_equal_weights(lab.weights(run, name), lab.weights(reference, name), name)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"peft_config": IA3Config()}, r"peft_config must be a LoraConfig, the type of.*got IA3Config"),
        (
            {"peft_config": LoraConfig(r=8, lora_alpha=6)},
            r"peft_config\.r must be 4, as in .*got 8.*Leave peft_config out",
        ),
        ({"peft_config": LoraConfig(r=4, lora_alpha=6, use_dora=True)}, r"peft_config\.use_dora .*got True"),
        ({"init_adapter": "nowhere"}, r"init_adapter must be the folder of a PEFT adapter.*got 'nowhere'"),
        ({"reference": "model"}, r"reference must be 'adapter' or 'backbone'.*got 'model'"),
        (
            {"reference": "adapter", "init_adapter": None, "peft_config": CONFIG},
            r"reference .*got 'adapter'.*init_adapter",
        ),
        ({"reference": "backbone", "objective": "orpo"}, r"reference must be None with a loss.*got 'backbone'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    start = saved(tmp_path / "start")
    with pytest.raises(ConfigError, match=rf"tasks\.a\.{said}"):
        task("a", settings.pop("init_adapter", start), **settings)


def test_an_adapter_of_the_hub_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = saved(tmp_path / "start")
    asked: list[str] = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: asked.append(name) or str(start))
    assert (task("a", "somebody/adapter").init_adapter, asked) == (str(start), ["somebody/adapter"])
