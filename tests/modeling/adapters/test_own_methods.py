"""Adapter Tuning and Diff Pruning in whole runs: each task as plain PEFT alone, with its noise and its penalty."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftConfig, PeftModel
from transformers import BitsAndBytesConfig, LlamaForCausalLM

from peft_mux import BottleneckConfig, ConfigError, DiffPruningConfig, MultiTaskPeftModel, Task
from peft_mux.adapters.diff_pruning import DiffPruningLinear, Noise
from peft_mux.kernels import philox
from peft_mux.reporting.hub import model_card
from tests.adapters.prompts.prompt_cases import config_of
from tests.engine.processes.cases import Part, assert_alike, assert_as_one, launch, values
from tests.invariants import mux_lab as lab
from tests.modeling.adapters import alone
from tests.modeling.adapters.lora import test_row_steps as steps
from tests.modeling.adapters.trained_parts import test_copies as copies
from tests.modeling.adapters.trained_parts import test_token_rows as rows
from tests.parallel.replicas.layout_cases import train

CONFIGS: dict[str, PeftConfig] = {
    "houlsby": BottleneckConfig(bottleneck_size=6),
    "narrow": BottleneckConfig(
        bottleneck_size=3, non_linearity="relu", down_bias=False, target_modules=["down_proj", "v_proj"]
    ),
    "diff": DiffPruningConfig(target_modules=["q_proj", "down_proj"], alpha_init=1.0, l0_weight=1e-4),
    "rows": DiffPruningConfig(target_modules=["v_proj"], structured=True, alpha_init=2.0, l0_weight=1e-3),
    "lora": LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"]),
}


def tasks_of(*names: str, max_steps: int = 4, **settings: Any) -> list[Task]:
    """Return tasks by the names of their configurations, of unequal rows."""
    tasks = []
    for number, name in enumerate(names or CONFIGS):
        task = lab.small_task(name, data_seed=20 + number, length=6 + 2 * number, max_steps=max_steps, **settings)
        tasks.append(replace(task, peft_config=copy.deepcopy(CONFIGS[name]), seed=3 + number))
    return tasks


def judge(trainer: Any, task: Task) -> lab.Verdict:
    """Train one task alone with plain PEFT, on the same rows.

    Gates are drawn as the task's are, by its seed, its steps and the names of its layers; the penalty is added once a
    step.
    """

    def losses_of(model: Any, batch: Any) -> Iterator[torch.Tensor]:
        seed = trainer.table[task.name].hyper.seed
        for name, layer in model.base_model.model.named_modules():
            if isinstance(layer, DiffPruningLinear):
                draws = [
                    philox.uniform(philox.draw_seed(seed, batch.step, key), *shape, torch.device("cpu")).logit().half()
                    for key, shape in ((name, layer.shape), (f"{name}.rows", (1, layer.shape[0])))
                ]
                layer.draw = lambda adapter, own=draws: Noise(own[0], own[1][0])  # type: ignore[method-assign]
        yield from lab._sequence_losses(model, batch)
        if isinstance(task.peft_config, DiffPruningConfig):
            yield model.base_model.l0_penalty()

    return alone.alone(trainer, task, lab.tiny_llama, losses_of)


def test_each_task_trains_as_plain_peft_alone_however_a_step_is_cut(tmp_path: Path) -> None:
    run = lab.train(tasks_of(), tmp_path / "whole")
    verdicts = {task.name: judge(run.trainer, task) for task in tasks_of()}
    lab.assert_as_judged(run, verdicts)
    assert all(verdict.losses[-1] != verdict.losses[0] for verdict in verdicts.values()), "something was learned"
    options = {"split_long_sequences": True, "max_tokens_per_micro_batch": 16, "chunk_size": 4}
    cut = lab.train(tasks_of(), tmp_path / "cut", gradient_checkpointing=True, **options)
    rounded = lab.train(tasks_of(max_steps=1), tmp_path / "bf16", bf16=True)
    for name in CONFIGS:
        lab.assert_same(cut, run, name, 1e-4)
        lab.assert_close(rounded.losses[name], run.losses[name][:1], 0.02, name)


def test_what_a_run_saves_says_what_to_import_is_pruned_in_plain_peft_and_then_refused_here(tmp_path: Path) -> None:
    run = lab.train(tasks_of("diff", "houlsby", max_steps=3), tmp_path, save_strategy="steps", save_steps=3)
    for name in ("diff", "houlsby"):
        assert "import peft_mux\nfrom peft import PeftModel" in str(model_card(tmp_path / name, "me/it", 3))
    with pytest.raises(ConfigError, match=r"merge needs an adapter that adds to a weight.*got BOTTLENECK"):
        run.trainer.model.task_view("houlsby").merge_and_unload()
    pruned = PeftModel.from_pretrained(lab.tiny_llama(), str(tmp_path / "diff"))
    pruned.base_model.prune()
    pruned.save_pretrained(str(tmp_path / "served" / "diff"))
    with pytest.raises(ConfigError, match=r"tasks\.diff\.peft_config\.kept must be.*, got \{.*the adapter was pruned"):
        MultiTaskPeftModel.from_pretrained(lab.tiny_llama(), tmp_path / "served")


@pytest.mark.slow
def test_on_a_quantised_backbone_tasks_train_as_in_plain_peft_and_are_not_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes")
    lab.tiny_llama().save_pretrained(tmp_path / "base")
    options = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")}
    monkeypatch.setattr(
        lab, "tiny_llama", lambda: LlamaForCausalLM.from_pretrained(tmp_path / "base", device_map="cpu", **options)
    )
    # Rounding of gradients that are all but zero is no step of AdamW then.
    tasks = tasks_of("houlsby", "diff", "lora", max_steps=3, adam_epsilon=1e-6)
    run = lab.train(tasks, tmp_path / "run")
    lab.assert_as_judged(run, {task.name: judge(run.trainer, task) for task in tasks})
    with pytest.raises(ConfigError, match="merge needs weights in full precision, got a DIFF_PRUNING adapter on a"):
        run.trainer.model.task_view("diff").merge_and_unload()


def train_every_way(rank: int, folder: Path, arguments: dict[str, Any]) -> Part:
    """Train tasks that train in different ways in one process: our methods, steps of rows, copies, rows, prompts."""
    others = {
        **{name: steps.CONFIGS[name] for name in ("dora", "initial", "biased", "blocks")},
        "copies": copies.CONFIGS["head"],
        "tokens": rows.CONFIGS["named"],
        **{form: config_of(form) for form in ("prompt", "mlp", "cpt", "prefix")},
    }
    tasks = [alone.task(name, config, number, max_steps=3) for number, (name, config) in enumerate(others.items())]
    return train(folder, lab.tiny_llama(), [*tasks, *tasks_of(max_steps=3)], **arguments)


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_train_tasks_of_every_way_to_the_result_of_one(tmp_path: Path) -> None:
    parts = values(launch(2, train_every_way, tmp_path / "two", {}, limit_s=120))
    assert_alike(parts)
    assert_as_one(parts[0], train_every_way(0, tmp_path / "one", {}))
