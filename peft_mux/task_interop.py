"""What a `TrainingArguments`, an `SFTConfig` or a trainer says of one task, as settings of a `Task`.

A setting of the run (`bf16`, `logging_steps`) is none of a task: `MultiTaskTrainingArguments.from_training_arguments`
takes those. One that means nothing here is refused with its reason, so that none is lost on the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING
from pathlib import Path
from typing import Any

from peft_mux.argument_fields import REASONS
from peft_mux.errors import ConfigError, Fault, raise_faults, shown

_AS_THEY_ARE = (
    "learning_rate num_train_epochs weight_decay lr_scheduler_kwargs warmup_steps max_grad_norm optim_args adam_beta1 "
    "adam_beta2 adam_epsilon seed max_length completion_only_loss assistant_only_loss hub_model_id "
    "label_smoothing_factor neftune_noise_alpha"
).split()
_OF_EVALUATION = "eval_delay eval_on_start load_best_model_at_end metric_for_best_model greater_is_better".split()
_SAME_LOSS = (None, "nll", "chunked_nll")
"""TRL computes the last of them block by block, which is how it is always done here."""
_OWN_DEFAULTS = ("transformers.", "trl.")


def task_settings_of(config: Any, *, has_eval: bool) -> dict[str, Any]:
    """Return the settings of a `Task` that a configuration of Trainer or TRL stands for.

    Args:
        config: a `TrainingArguments`, such as `SFTConfig`.
        has_eval: whether the task has held-out rows.

    Raises:
        ConfigError: naming what cannot be done here, with the reason.
    """
    raise_faults(_refused(config))
    settings = {name: getattr(config, name) for name in _AS_THEY_ARE if hasattr(config, name)}
    for name in ("optim", "lr_scheduler_type"):
        settings[name] = getattr(getattr(config, name), "value", getattr(config, name))
    if config.max_steps > 0:
        settings["max_steps"] = config.max_steps
    settings["train_batch_size"] = (
        config.per_device_train_batch_size * config.gradient_accumulation_steps * config.world_size
    )
    if has_eval:
        settings |= {name: getattr(config, name) for name in _OF_EVALUATION}
        if getattr(config.eval_strategy, "value", config.eval_strategy) == "steps":
            settings["eval_steps"] = config.eval_steps
    if getattr(config, "loss_type", None) not in _SAME_LOSS:
        settings["loss_type"] = config.loss_type
    if getattr(config, "chat_template_path", None):
        settings["chat_template"] = Path(config.chat_template_path).read_text(encoding="utf-8")
    if getattr(config, "dataset_text_field", "text") != "text":
        settings["row_format"] = {"text": config.dataset_text_field}
    # What is left out has the same meaning on a `Task`: nothing of it is set.
    return {name: value for name, value in settings.items() if value is not None}


def _refused(config: Any) -> list[Fault]:
    """Return a fault for each field that is set although it means nothing here."""
    from transformers import TrainingArguments

    if not isinstance(config, TrainingArguments):
        allowed = "a TrainingArguments of transformers, or SFTConfig of TRL"
        return [Fault("config", type(config).__name__, allowed)]
    faults = [
        Fault(f"config.{name}", shown(getattr(config, name)), "its default", f"Reason: {why}.")
        for name, why in REASONS.items()
        if hasattr(config, name) and not is_default(config, name)
    ]
    template = getattr(config, "chat_template_path", None)
    if template and not Path(template).is_file():
        faults.append(Fault("config.chat_template_path", shown(template), "a file with a Jinja template"))
    return faults


def is_default(config: Any, name: str) -> bool:
    """Whether a field of `TrainingArguments` is at its default, in whatever form transformers keeps it.

    No arguments are made to compare with: that would take the state away from which other trainers read their devices.

    Args:
        config: the arguments.
        name: name of the field.
    """
    from transformers import TrainingArguments
    from transformers.trainer_pt_utils import AcceleratorConfig

    item = TrainingArguments.__dataclass_fields__[name]
    default = item.default if item.default is not MISSING else item.default_factory()  # type: ignore[misc]
    value = getattr(config, name)
    if isinstance(value, AcceleratorConfig):
        return value == AcceleratorConfig()
    if value in ([], None, False) and default in ("", "none", [], None, False):
        return True
    return str(getattr(value, "value", value)) == str(getattr(default, "value", default))


def task_settings_of_trainer(trainer: Any) -> dict[str, Any]:
    """Return the settings of a `Task` that a trainer of transformers or TRL stands for: rows, adapter and all.

    Args:
        trainer: a `Trainer` or `SFTTrainer` that was made with an adapter and has not trained.

    Raises:
        ConfigError: naming what cannot be done here, with the reason.
    """
    config = getattr(trainer, "args", None)
    adapters: Any = getattr(getattr(trainer, "model", None), "peft_config", None)
    faults = []
    if not isinstance(adapters, Mapping) or len(adapters) != 1:
        allowed = "a trainer of a model with one adapter: SFTTrainer(peft_config=...), or a PeftModel"
        faults.append(Fault("trainer.model", type(getattr(trainer, "model", None)).__name__, allowed))
    if getattr(config, "packing", False):
        fix = "Give its rows before they were packed: Task.from_sft_config(name, config, train_dataset=rows)."
        faults.append(Fault("trainer.args.packing", "True", "False, as packed rows cannot be told apart", fix))
    if getattr(trainer, "formatting_func", None) is not None:
        faults.append(Fault("trainer.formatting_func", "a function", "rows that were mapped before"))
    raise_faults(faults)
    assert isinstance(adapters, Mapping), "anything else is a fault"
    eval_dataset = trainer.eval_dataset or None
    if isinstance(eval_dataset, Mapping):
        raise ConfigError("trainer.eval_dataset: got several; allowed: one. Give it to Task.from_sft_config.")
    settings = task_settings_of(config, has_eval=eval_dataset is not None)
    settings.pop("row_format", None)  # its rows are tokenised already
    for name in ("compute_metrics", "preprocess_logits_for_metrics"):
        settings[name] = getattr(trainer, name, None)
    own = [one for one in trainer.callback_handler.callbacks if _is_own(one)]
    return {
        **settings,
        "peft_config": next(iter(adapters.values())),
        "train_dataset": _labelled(trainer.train_dataset, settings),
        "eval_dataset": None if eval_dataset is None else _labelled(eval_dataset, settings),
        "callbacks": own,
    }


def _is_own(callback: Any) -> bool:
    """Whether a callback is one that somebody gave, rather than a part of the trainer itself."""
    name = type(callback).__name__
    return name == "EarlyStoppingCallback" or not type(callback).__module__.startswith(_OWN_DEFAULTS)


class _MaskedRows:
    """Tokenised rows of TRL, whose masks become the labels that its collator would make of them."""

    def __init__(self, rows: Any, masks: list[str]) -> None:
        self._rows, self._masks = rows, masks
        self.column_names = ["input_ids", "labels"]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self._rows[index]
        labels = list(row.get("labels", row["input_ids"]))
        for mask in self._masks:
            labels = [label if keep else -100 for label, keep in zip(labels, row[mask], strict=True)]
        return {"input_ids": list(row["input_ids"]), "labels": labels}


def _labelled(rows: Any, settings: dict[str, Any]) -> Any:
    """Return tokenised rows with labels where TRL has masks; others as they are."""
    names = getattr(rows, "column_names", None) or []
    wanted = {"completion_mask": settings.get("completion_only_loss", True), "assistant_masks": True}
    masks = [name for name, is_read in wanted.items() if name in names and is_read]
    if "input_ids" not in names or not masks:
        return rows
    # What the masks say is in the labels now.
    settings.pop("completion_only_loss", None)
    settings.pop("assistant_only_loss", None)
    return _MaskedRows(rows, masks)
