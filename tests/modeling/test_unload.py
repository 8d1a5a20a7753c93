"""A backbone that a model is made of is given back as it came, and never adapted twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from peft_mux import ConfigError, MultiTaskTrainer
from peft_mux.errors import UnsupportedModelError
from peft_mux.modeling.model import MultiTaskPeftModel
from tests.invariants.mux_lab import make_trainer, small_task, tiny_llama, weights
from tests.modeling.adapters.passes import assert_same_tensors, snapshot
from tests.modeling.test_model import PROMPT, backbone, batch_of, lora


def facts(model: Any) -> dict[str, Any]:
    """Return everything in a backbone that must be unchanged, except the numbers."""
    return {
        "modules": [(name, type(module), "forward" in module.__dict__) for name, module in model.named_modules()],
        "gradients": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "training": [module.training for module in model.modules()],
        "attention": model.config._attn_implementation,
        "checkpointing": getattr(model, "is_gradient_checkpointing", False),
    }


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_an_unloaded_backbone_is_in_every_part_the_one_that_came(kind: str) -> None:
    base = backbone(kind).eval()
    base.requires_grad_(False)
    next(base.parameters()).requires_grad_(True)
    before, logits = facts(base), base(PROMPT).logits
    tensors = snapshot(base.state_dict())
    task_type = "SEQ_CLS" if kind == "bert" else "CAUSAL_LM"
    model = MultiTaskPeftModel(base, {name: lora(4, task_type=task_type) for name in "ab"})
    model.train()
    model.activation_checkpointing_enable()
    model(batch_of("a", "b", label=1 if kind == "bert" else None)).losses.sum().backward()
    assert model.unload() is base
    assert facts(base) == before
    assert_same_tensors(base.state_dict(), tensors)
    assert torch.equal(base(PROMPT).logits, logits)
    assert model.tasks == ()
    with pytest.raises(ConfigError, match=r'the task must be none, because the model holds no tasks, got "a"'):
        model.task_view("a")


def test_a_second_trainer_of_one_backbone_is_refused_until_the_first_has_given_it_back(tmp_path: Path) -> None:
    base, tasks = tiny_llama(), [small_task("own", data_seed=1)]
    first = make_trainer(tasks, tmp_path / "a", model=base, save_strategy="steps")
    first.train()
    with pytest.raises(UnsupportedModelError, match=r"still holds the adapters of another trainer.*model.unload\(\)"):
        make_trainer(tasks, tmp_path / "b", model=base)
    held_out = small_task("other", data_seed=2, eval_dataset=small_task("x", data_seed=3).train_dataset)
    second = make_trainer([held_out], tmp_path / "b", model=first.model.unload(), save_strategy="steps")
    second.train()
    alone = make_trainer([held_out], tmp_path / "c")
    alone.train()
    assert_same_tensors(weights(second, "other"), weights(alone, "other"))
    assert loss_of_the_saved(tmp_path / "b" / "other", second) == pytest.approx(
        second.evaluate("other")["other/eval_loss"], rel=1e-5
    )


@torch.no_grad()
def loss_of_the_saved(folder: Path, trainer: MultiTaskTrainer) -> float:
    """Return the held-out loss of a saved adapter on a backbone that no trainer has seen."""
    model = PeftModel.from_pretrained(tiny_llama(), folder).eval()
    rows = trainer.table["other"].task.eval_dataset
    batch = torch.tensor([row["input_ids"] for row in rows])
    return float(model(input_ids=batch, labels=batch).loss)
