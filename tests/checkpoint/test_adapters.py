"""A saved adapter is one that plain PEFT loads, and there it gives the logits of the trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import LlamaForSequenceClassification

from peft_mux.task import Task
from tests.invariants import mux_lab as lab
from tests.invariants.mux_lab import Recorder, Run
from tests.runs import SAVING, assert_equal_weights, folder_of, weights_in_plain_peft

CONFIGS = {
    "all-linear": {"r": 4, "lora_alpha": 9, "target_modules": "all-linear", "lora_dropout": 0.2},
    "head-and-embeddings": {"r": 3, "target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "rank-stabilised": {"r": 8, "use_rslora": True, "target_modules": ["v_proj", "up_proj"]},
    "patterns": {
        "r": 4,
        "rank_pattern": {"q_proj": 2},
        "alpha_pattern": {"up_proj": 5},
        "target_modules": ["q_proj", "up_proj"],
    },
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    settings: dict[str, Any] = {"train_batch_size": 4, "learning_rate": 1e-2, "max_steps": 3}
    tasks = [
        Task(name=name, peft_config=LoraConfig(**options), train_dataset=lab.rows(seed, 8, 11, 11), **settings)
        for seed, (name, options) in enumerate(CONFIGS.items())
    ]
    return lab.train(tasks, tmp_path_factory.mktemp("trained"), recorder=Recorder(keep_weights=False), **SAVING)


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_a_saved_adapter_gives_the_trained_logits_in_plain_peft(name: str, trained: Run) -> None:
    folder = folder_of(trained) / name
    plain = PeftModel.from_pretrained(lab.tiny_llama(), folder).eval()
    trained.trainer.model.eval()
    ids = torch.tensor([lab.rows(99, 1, 13, 13)[0]["input_ids"]])
    ours, theirs = trained.trainer.model.task_view(name)(input_ids=ids).logits, plain(input_ids=ids).logits
    untrained = lab.tiny_llama().eval()(input_ids=ids).logits
    assert torch.equal(ours, theirs)
    assert not torch.allclose(theirs, untrained, atol=1e-3), "the adapter adds nothing"
    assert_equal_weights(weights_in_plain_peft(folder), trained.weights(name))


@torch.no_grad()
def test_saved_classifiers_of_different_sizes_give_the_trained_logits_in_plain_peft(tmp_path: Path) -> None:
    def backbone(num_labels: int) -> LlamaForSequenceClassification:
        config = lab.tiny_llama().config
        config.num_labels, config.pad_token_id = num_labels, 0
        model = LlamaForSequenceClassification(config)
        lab.fill(model.model, 0)
        return model

    classes = {"two": 2, "five": 5}
    tasks = [
        Task(
            name=name,
            peft_config=LoraConfig(r=4, task_type="SEQ_CLS", target_modules=["q_proj", "v_proj"]),
            train_dataset=[{**row, "label": n % count} for n, row in enumerate(lab.rows(count, 10, 9, 9))],
            train_batch_size=5,
            learning_rate=1e-2,
            max_steps=3,
        )
        for name, count in classes.items()
    ]
    with torch.enable_grad():
        run = lab.train(tasks, tmp_path, model=backbone(2), recorder=Recorder(keep_weights=False), **SAVING)
    run.trainer.model.eval()
    ids = torch.tensor([lab.rows(99, 1, 13, 13)[0]["input_ids"]])
    for name, count in classes.items():
        plain = PeftModel.from_pretrained(backbone(count), tmp_path / name).eval()
        theirs = plain(input_ids=ids).logits
        assert theirs.shape == (1, count)
        assert torch.equal(run.trainer.model.task_view(name)(input_ids=ids).logits, theirs), name
