"""Every public method that `Trainer` hands down either does what its name says, or is refused by name."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from peft import LoraConfig
from safetensors.torch import save_file
from transformers import Trainer

from peft_mux import ConfigError, MultiTaskTrainer, MultiTaskTrainingArguments
from peft_mux.reporting.hub import model_card
from peft_mux.trainer.trainer import REFUSED, WORKING
from tests.invariants.mux_lab import Run, make_trainer, small_task, train
from tests.runs import Acts, assert_equal_weights, small_tasks, weights_in_plain_peft

METHODS = sorted(name for name, item in inspect.getmembers(Trainer) if callable(item) and not name.startswith("_"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a run of two tasks that has ended."""
    return train(small_tasks("mine", "theirs", max_steps=2), tmp_path_factory.mktemp("run"))


def test_every_public_method_of_trainer_is_in_one_of_the_two_tables() -> None:
    """A method that a later transformers brings is looked at before it is inherited."""
    assert set(METHODS) == WORKING | set(REFUSED)
    assert WORKING & set(REFUSED) == set()


def test_a_refused_method_says_what_to_call_instead(trained: Run) -> None:
    for name, instead in REFUSED.items():
        for arguments in ((), (1, 2, 3, 4)):
            with pytest.raises(
                ConfigError, match=rf"^trainer\.{name} is Trainer's method for one task. Use "
            ) as caught:
                getattr(trained.trainer, name)(*arguments)
        assert instead in str(caught.value)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_training_without_gradients_is_refused_instead_of_changing_nothing(
    off: Callable[[], Any], tmp_path: Path
) -> None:
    trainer = make_trainer([small_task("own", data_seed=1)], tmp_path)
    said = r"train must be called outside torch\.no_grad\(\) and torch\.inference_mode\(\), because"
    with off(), pytest.raises(ConfigError, match=said):
        trainer.train()
    assert trainer.task_statuses == {"own": "running"}
    assert trainer.state.global_step == 0


# -------------------------------------------------------------- those that work


def test_what_a_script_calls_of_trainer_works_as_there(trained: Run, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = trained.trainer
    heard: list[dict[str, float]] = []
    ears = Acts(lambda logs, **_: heard.append(logs), event="on_log")
    trainer.add_callback(ears)
    trainer.log({"extra": 1.0})
    assert trainer.pop_callback(Acts) is ears
    trainer.log({"extra": 2.0})
    assert heard == [{"extra": 1.0}]
    assert [entry["extra"] for entry in trainer.state.log_history if "extra" in entry] == [1.0, 2.0]
    own = [trainer.model.task_parameters(name).values() for name in ("mine", "theirs")]
    assert trainer.get_num_trainable_parameters() == sum(weight.numel() for weights in own for weight in weights)
    args = MultiTaskTrainingArguments(output_dir="unused", use_cpu=True, optim="sgd", learning_rate=0.5)
    assert MultiTaskTrainer.get_optimizer_cls_and_kwargs(args) == (torch.optim.SGD, {"lr": 0.5})
    trainer.log_metrics("train", {"mine/loss": 1.5})
    assert "mine/loss" in capsys.readouterr().out
    trainer.save_metrics("train", {"mine/loss": 1.5})
    trainer.save_state()
    root = Path(trainer.args.output_dir)
    assert json.loads((root / "train_results.json").read_text()) == {"mine/loss": 1.5}
    assert json.loads((root / "trainer_state.json").read_text())["global_step"] == 2


# ------------------------------------------------------------------------ the Hub


class Hub:
    """Replaces `HfApi`: keeps what is uploaded."""

    def __init__(self, token: str | None = None) -> None:
        self.token = token
        HUBS.append(self)

    def create_repo(self, repo_id: str, *, private: bool | None, exist_ok: bool) -> None:
        self.repo = (repo_id, private, exist_ok)
        if repo_id == "no/where":
            raise ConnectionError("no route to host")

    def create_commit(self, repo_id: str, operations: Any, *, commit_message: str, revision: str | None) -> str:
        self.files = {operation.path_in_repo: operation.path_or_fileobj for operation in operations}
        self.commit = (repo_id, commit_message, revision)
        return "committed"


HUBS: list[Hub] = []


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[Hub]:
    HUBS.clear()
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    return HUBS


def test_the_adapter_of_one_task_is_uploaded_and_nothing_else(trained: Run, hub: list[Hub], tmp_path: Path) -> None:
    answer = trained.trainer.push_to_hub("mine", repo_id="me/mine-lora", private=True, token="t", revision="v1")
    assert answer == "committed"
    (sent,) = hub
    assert (sent.token, sent.repo) == ("t", ("me/mine-lora", True, True))
    assert sent.commit == ("me/mine-lora", "Adapter after 2 steps", "v1")
    assert set(sent.files) == {"adapter_config.json", "adapter_model.safetensors", "README.md"}
    for name, data in sent.files.items():
        (tmp_path / name).write_bytes(data)
    assert_equal_weights(weights_in_plain_peft(tmp_path), trained.weights("mine"))


def test_an_upload_that_cannot_be_meant_or_fails_is_refused(trained: Run, hub: list[Hub], tmp_path: Path) -> None:
    options: dict[str, Any] = {"repo_id": "../x", "blocking": False}
    for name, given, parts in (
        ("End of training", {}, ['the task must be one of mine, theirs, got "End of training"']),
        ("mine", {}, ["push_to_hub.repo_id must be ", "got ''"]),
        ("mine", {"repo_id": 5}, ["push_to_hub.repo_id must be ", "got 5"]),
        ("mine", options, ["2 things", "push_to_hub.blocking must be one of "]),
    ):
        with pytest.raises(ConfigError) as caught:
            trained.trainer.push_to_hub(name, **given)
        assert all(part in str(caught.value) for part in parts), str(caught.value)
    untrained = make_trainer([small_task("own", data_seed=1)], tmp_path)
    with pytest.raises(ConfigError, match=r"tasks\.own must be a task that has taken a step, got one without a step"):
        untrained.push_to_hub("own", repo_id="me/own")
    assert hub == []
    with pytest.raises(ConfigError, match='the upload to "no/where" failed: no route to host'):
        trained.trainer.push_to_hub("mine", repo_id="no/where")


def test_a_card_names_the_class_that_loads_the_backbone_and_no_folder_of_this_machine(tmp_path: Path) -> None:
    for task_type, pipeline, auto_class in (
        (None, "text-generation", "AutoModelForCausalLM"),
        ("SEQ_CLS", "text-classification", "AutoModelForSequenceClassification"),
        ("TOKEN_CLS", "token-classification", "AutoModelForTokenClassification"),
    ):
        LoraConfig(task_type=task_type, base_model_name_or_path="org/base").save_pretrained(str(tmp_path))
        save_file({"base_model.model.score.weight": torch.zeros(3, 2)}, tmp_path / "adapter_model.safetensors")
        classes = ", num_labels=3" if task_type else ""
        card = model_card(tmp_path, "me/own", 2)
        assert (card.data.pipeline_tag, card.data.base_model, card.data.library_name) == (pipeline, "org/base", "peft")
        assert "LORA adapter for `org/base`, fine-tuned for 2 optimizer steps" in card.text
        assert f'PeftModel.from_pretrained({auto_class}.from_pretrained("org/base"{classes}), "me/own")' in card.text
    LoraConfig(base_model_name_or_path=str(tmp_path)).save_pretrained(str(tmp_path))
    local = model_card(tmp_path, "me/own", 2)
    assert str(tmp_path) not in str(local)
    assert local.data.base_model is None
