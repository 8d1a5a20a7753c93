"""Converts a configuration or a trainer of transformers or TRL to the settings of a `Task`.

The class of the trainer, or of its configuration, decides the objective: an `ORPOTrainer` trains a different loss than
a `DPOTrainer` on the same rows. Each field of a configuration is carried over, has no effect here (`NO_EFFECT`), or is
refused by name unless it has its default. So no setting that changes training is lost.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import torch
from transformers import EarlyStoppingCallback, IntervalStrategy, TrainingArguments

from peft_mux.arguments import SETTABLE_FIELDS, by_name, is_default, reason_against
from peft_mux.errors import Fault, raise_faults, shown
from peft_mux.modeling.adapters.checks import config_faults
from peft_mux.modeling.objectives.objective import OBJECTIVES, Objective

_OBJECTIVES = {
    "SFT": None,  # the columns of the rows decide, as in TRL
    "DPO": "dpo",
    "ORPO": "orpo",
    "CPO": "cpo",
    "KTO": "kto",
    "Reward": "reward",
    "GRPO": "policy",
}
"""Objectives by the names of TRL's trainers and configurations, without "Trainer" and "Config"."""
_SAME_NAMES = (
    "learning_rate num_train_epochs weight_decay lr_scheduler_kwargs warmup_steps max_grad_norm optim_args adam_beta1 "
    "adam_beta2 adam_epsilon seed max_length completion_only_loss assistant_only_loss hub_model_id "
    "label_smoothing_factor neftune_noise_alpha optim lr_scheduler_type router_aux_loss_coef packing "
    "truncation_mode"
).split()
_OF_EVALUATION = "eval_delay eval_on_start load_best_model_at_end metric_for_best_model greater_is_better".split()
_OF_ROWS = "completion_only_loss assistant_only_loss chat_template_path dataset_text_field eos_token dataset_kwargs"
"""Fields that say how TRL tokenises rows; the rows of a trainer are tokenised already."""
CARRIED = frozenset(
    {*_SAME_NAMES, *_OF_EVALUATION, "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps"}
    | {"eval_strategy", "eval_steps", "loss_type", "chat_template_path", "dataset_text_field", "disable_dropout"}
    | {"train_sampling_strategy", "dataloader_drop_last"}
)
"""Fields that become settings of the task. Those of `objective.Args` become its `objective_args`."""
NO_EFFECT = by_name(
    {
        "model_init_kwargs trust_remote_code is_encoder_decoder": "the backbone is given to MultiTaskTrainer",
        "padding_free pad_to_multiple_of pad_token padding_value": "sequences are packed without padding",
        "packing_strategy": "it only applies with packing",
        "eval_packing": "the loss of held-out rows is a mean over their tokens, however they are packed",
        "dataset_num_proc": "rows are tokenised once, in one process",
        "shuffle_dataset": "Task.shuffle and Task.seed give the order of rows",
        "activation_offloading": "it moves activations and changes no result",
        "precompute_ref_log_probs precompute_ref_batch_size": "reference values are the same whenever computed",
        "ref_model_mixup_alpha ref_model_sync_steps": "they only apply with sync_ref_model, which is refused",
        "generate_during_eval": "Task.eval_generate generates at evaluations",
        # GRPO: the objective "policy" trains on rollouts and advantages that the rows contain.
        "num_generations num_generations_eval generation_batch_size steps_per_generation ds3_gather_for_generation "
        "top_p top_k min_p generation_kwargs chat_template_kwargs repetition_penalty cache_implementation "
        "max_tool_calling_iterations use_transformers_paged use_transformers_continuous_batching "
        "transformers_continuous_batching_config vllm_mode vllm_model_impl vllm_enable_sleep_mode "
        "vllm_structured_outputs_regex vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout "
        "vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size "
        "vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max "
        "vllm_importance_sampling_clip_min vllm_importance_sampling_cap": "rows contain generated rollouts",
        "reward_weights multi_objective_aggregation scale_rewards": "rows contain advantages",
        "log_completions log_multimodal num_completions_to_print log_unique_prompts log_completions_hub_repo": (
            "rows contain completions, which are not logged"
        ),
        "sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg": (
            "they only apply with the losses sapo and vespo, which are refused"
        ),
        "entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target": (
            "they only apply with use_adaptive_entropy, which is refused"
        ),
    }
)
"""Fields of TRL's configurations that change no result here, and why."""
_REASONS = by_name(
    {
        "eos_token": "texts end with the tokenizer's eos_token; set it there",
        "dataset_kwargs": "map the rows beforehand",
        "max_prompt_length": "rows are truncated as a whole, by max_length",
        "sync_ref_model": "the reference does not change",
        "use_vllm": "rows contain rollouts, and the correction for vLLM's sampling is not offered",
        "mask_truncated_completions": "give labels of -100 to the tokens of such rows",
        "num_iterations": "set num_train_epochs to train on the same rollouts again",
    }
)


def settings_of(config: Any, given: Mapping[str, Any], *, rows_are_tokenised: bool = False) -> dict[str, Any]:
    """Return the settings of a `Task` that a configuration of Trainer or TRL stands for.

    Args:
        config: a `TrainingArguments`, or a configuration of a trainer of TRL.
        given: settings of the task that replace those of the configuration.
        rows_are_tokenised: whether TRL has tokenised the rows, so that tokenisation settings no longer apply.

    Raises:
        ConfigError: naming what cannot be done here, with the reason.
    """
    if not isinstance(config, TrainingArguments):
        allowed = "a TrainingArguments of transformers, or a configuration of TRL such as SFTConfig"
        raise_faults([Fault("config", type(config).__name__, allowed)])
    faults, name = _objective_of(type(config), "Config", "config")
    objective = OBJECTIVES[name] if name else OBJECTIVES["sft"]
    if not faults:
        faults = _refusals(config, objective, given, rows_are_tokenised)
    raise_faults(faults)
    settings = {name: getattr(config, name, None) for name in _SAME_NAMES}
    if not hasattr(config, "router_aux_loss_coef"):
        settings["router_aux_loss_coef"] = 0.0  # Trainer, and other trainers of TRL, leave it to `output_router_logits`
    settings["max_steps"] = config.max_steps if config.max_steps > 0 else None
    settings["train_batch_size"] = (
        config.per_device_train_batch_size * config.gradient_accumulation_steps * config.world_size
    )
    if given.get("eval_dataset") is not None:
        settings |= {name: getattr(config, name) for name in _OF_EVALUATION}
        if config.eval_strategy == IntervalStrategy.STEPS:
            settings["eval_steps"] = config.eval_steps
    strategies = {"sequential": False, "group_by_length": "group_by_length"}
    settings["shuffle"] = strategies.get(config.train_sampling_strategy)
    settings["dataloader_drop_last"] = config.dataloader_drop_last or None
    if name is not None:
        settings["objective"] = name
    loss_type = getattr(config, "loss_type", None)
    # TRL computes "chunked_nll" block by block, which is how it is always done here.
    if loss_type not in (None, "nll", "chunked_nll"):
        settings["loss_type"] = loss_type[0] if isinstance(loss_type, list) and len(loss_type) == 1 else loss_type
    args = {}
    for item in fields(objective.Args):
        if item.name in type(config).__dataclass_fields__ and item.name not in CARRIED:
            value = getattr(config, item.name)
            if value != item.default:
                args[item.name] = value
    # A bound on what is generated, except for the loss that divides by it.
    if loss_type != "dr_grpo":
        args.pop("max_completion_length", None)
    settings["objective_args"] = args or None
    template = getattr(config, "chat_template_path", None)
    if template:
        settings["chat_template"] = Path(template).read_text(encoding="utf-8")
    if getattr(config, "dataset_text_field", "text") != "text":
        settings["row_format"] = {"text": config.dataset_text_field}  # type: ignore[attr-defined]
    if rows_are_tokenised:
        for name in ("row_format", "chat_template", "completion_only_loss", "assistant_only_loss"):
            settings.pop(name, None)
    settings = {name: getattr(value, "value", value) for name, value in settings.items()}
    settings = {**{name: value for name, value in settings.items() if value is not None}, **given}
    # TRL switches the dropout of the whole model off.
    if getattr(config, "disable_dropout", False) and (adapter := given.get("peft_config")) is not None:
        dropouts = [name for name in vars(adapter) if name.endswith("dropout") and getattr(adapter, name)]
        settings["peft_config"] = copy.deepcopy(adapter)
        for name in dropouts:
            setattr(settings["peft_config"], name, 0.0)
    return settings


def _objective_of(kind: type, ending: str, where: str) -> tuple[list[Fault], str | None]:
    """Return the objective of a class of TRL, or of the class of TRL that it is derived from; `None` for Trainer's."""
    classes = [
        base for base in kind.__mro__ if base.__module__.startswith("trl.") and not base.__name__.startswith("_")
    ]
    if not classes:
        return [], None
    name = classes[0].__name__.removesuffix(ending)
    objective = _OBJECTIVES.get(name)
    if name in _OBJECTIVES and (objective is None or objective in OBJECTIVES):
        return [], objective
    offered = [f"{base}{ending}" for base, loss in _OBJECTIVES.items() if loss is None or loss in OBJECTIVES]
    fix = "docs/losses.md lists what is not offered."
    return [Fault(where, classes[0].__name__, f"{', '.join(offered)}, or those of transformers", fix)], None


def _refusals(config: Any, objective: Objective, given: Mapping[str, Any], rows_are_tokenised: bool) -> list[Fault]:
    """Return a fault for each field whose value a task does not support."""
    trainer_fields = TrainingArguments.__dataclass_fields__
    faults = [
        Fault(f"config.{name}", shown(getattr(config, name)), "its default", f"Reason: {reason_against(name)}.")
        for name in [item.name for item in fields(TrainingArguments) if item.init]
        if name not in SETTABLE_FIELDS and name not in CARRIED and not is_default(config, name)
    ]
    if config.train_sampling_strategy not in ("random", "sequential", "group_by_length"):
        got = shown(config.train_sampling_strategy)
        faults.append(Fault("config.train_sampling_strategy", got, "random, sequential or group_by_length"))
    if config.dataloader_drop_last and config.gradient_accumulation_steps > 1:
        allowed = "False with gradient_accumulation_steps above 1, of whose batches Trainer drops a part"
        faults.append(Fault("config.dataloader_drop_last", "True", allowed))
    known = {*CARRIED, *NO_EFFECT, *(item.name for item in fields(objective.Args))}
    known |= set(_OF_ROWS.split()) if rows_are_tokenised else set()
    strategy = getattr(config, "packing_strategy", "bfd")
    if given.get("packing", getattr(config, "packing", False)) and strategy != "bfd":
        fix = "Use Task.from_trainer, which takes rows as they are packed, or give packing=False to count sequences."
        faults.append(Fault("config.packing_strategy", shown(strategy), "'bfd'", fix))
    # Fields that a class of your own adds are for your script: no trainer reads them.
    for item in fields(next(filter(_is_of_libraries, type(config).__mro__))):
        if item.name in trainer_fields or item.name in known or not item.init:
            continue
        value, default = getattr(config, item.name), item.default
        default = item.default_factory() if item.default_factory is not MISSING else default
        if value == default:
            continue
        reason = _REASONS.get(item.name) or objective.Args.refused.get(item.name) or "it is not offered"
        faults.append(Fault(f"config.{item.name}", shown(value), f"its default {default!r}", f"Reason: {reason}."))
    if getattr(config, "max_length", 0) is None and "max_length" not in given:
        faults.append(Fault("config.max_length", "None", "a number of tokens", "Set it, or give max_length=..."))
    template = getattr(config, "chat_template_path", None)
    if template and not rows_are_tokenised and not Path(template).is_file():
        faults.append(Fault("config.chat_template_path", shown(template), "a file with a Jinja template"))
    return faults


# ------------------------------------------------------------------------------------------------------------- trainers


def settings_of_trainer(trainer: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the `Task` that a `Trainer`, or a trainer of TRL, was made for.

    Args:
        trainer: a trainer with one adapter that has not trained.
        given: settings of the task that replace those of the trainer.

    Raises:
        ConfigError: naming what cannot be done here, with the reason.
    """
    raise_faults(_trainer_faults(trainer, given))
    fields: dict[str, Any] = {
        "peft_config": next(config for name, config in trainer.model.peft_config.items() if name != _REFERENCE),
        "train_dataset": trainer.train_dataset,
        "eval_dataset": trainer.eval_dataset or None,
        "compute_metrics": trainer.compute_metrics,
        "preprocess_logits_for_metrics": trainer.preprocess_logits_for_metrics,
        # Callbacks of the libraries are parts of their trainers; only this one is chosen by the user.
        "callbacks": [
            callback
            for callback in trainer.callback_handler.callbacks
            if isinstance(callback, EarlyStoppingCallback) or not _is_of_libraries(type(callback))
        ],
    }
    if "train_dataset" not in given:
        fields["packing"] = False  # its rows are packed already, and say where their sequences begin
    return settings_of(trainer.args, {**fields, **given}, rows_are_tokenised=True)


def _is_of_libraries(kind: object) -> bool:
    return getattr(kind, "__module__", "").startswith(("transformers.", "trl."))


_REFERENCE = "ref"
"""The name under which trainers of TRL add a copy of the adapter of a `PeftModel`, which the loss compares with."""


def _trainer_faults(trainer: Any, given: Mapping[str, Any]) -> list[Fault]:
    """Return a fault for each part of a trainer's training that its task cannot reproduce."""
    faults, objective = _objective_of(type(trainer), "Trainer", "trainer")
    config: Any = getattr(trainer, "args", None)
    model: Any = getattr(trainer, "model", None)
    adapters: Any = getattr(model, "peft_config", None)
    names = [name for name in adapters if name != _REFERENCE] if isinstance(adapters, Mapping) else []
    is_reference_equal = True
    if len(names) == 1:  # the reference adapter, if there is one, must equal the adapter that is trained
        weights, marker = dict(model.named_parameters()), f".{_REFERENCE}."
        for key, weight in weights.items():
            if marker in f"{key}.":
                trained = f"{key}.".replace(marker, f".{names[0]}.")[:-1]
                is_reference_equal = is_reference_equal and torch.equal(weight, weights[trained])
    if len(names) != 1 or not is_reference_equal:
        allowed = "a trainer of a model with one adapter: SFTTrainer(peft_config=...), or a PeftModel"
        got = f"{type(model).__name__} with {', '.join(adapters)}" if adapters else type(model).__name__
        fix = "Take the others out: model.delete_adapter(...)." if adapters else ""
        return [*faults, Fault("trainer.model", got, allowed, fix)]
    adapter: Any = adapters[names[0]]
    if "peft_config" not in given:
        faults += config_faults(adapter, "trainer.model")
    if type(trainer).__name__.startswith(("GRPO", "RLOO")):
        fix = 'Give rollouts with advantages to Task(objective="policy"): docs/losses.md.'
        faults.append(Fault("trainer", type(trainer).__name__, "a trainer whose rows are given", fix))
    if not faults and _objective_of(type(config), "Config", "trainer.args") != ([], objective):
        allowed = f"the configuration of a {type(trainer).__name__}"
        faults.append(Fault("trainer.args", type(config).__name__, allowed))
    if getattr(config, "packing", False) and config.packing_strategy == "wrapped" and "train_dataset" not in given:
        allowed = (
            "'bfd' or 'bfd_split', because rows without targets are left out here, which TRL counts in its batches"
        )
        faults.append(Fault("trainer.args.packing_strategy", "'wrapped'", allowed))
    if getattr(trainer, "formatting_func", None) is not None:
        faults.append(Fault("trainer.formatting_func", "a function", "None", "Map the rows before."))
    if getattr(trainer, "compute_loss_func", None) is not None or not _is_of_libraries(type(trainer).compute_loss):
        fix = "Give Task(objective=function): docs/losses.md."
        faults.append(Fault("trainer.compute_loss", "your own loss", "the loss of its class", fix))
    if not _is_of_libraries(type(trainer.data_collator)) and "train_dataset" not in given:
        fix = "Give the rows as it makes them: train_dataset=..."
        faults.append(Fault("trainer.data_collator", "your own", "one of transformers or TRL", fix))
    if getattr(trainer.data_collator, "mlm", False):
        faults.append(
            Fault("trainer.data_collator.mlm", "True", "False, because masked language modelling is not supported")
        )
    for name in ("optimizer", "lr_scheduler"):
        if getattr(trainer, name, None) is not None:
            faults.append(Fault(f"trainer.{name}", "your own", "None", "Set optim and lr_scheduler_type."))
    if getattr(trainer, "ref_model", None) is not None:
        faults.append(Fault("trainer.ref_model", "a model", "None, which is the backbone without adapters"))
    # An untrained LoRA is 0, except with some initialisations.
    is_zero_at_first = adapter.peft_type == "LORA" and adapter.init_lora_weights is True
    has_moved = is_zero_at_first and any(
        ".lora_B." in name and bool(parameter.any()) for name, parameter in model.named_parameters()
    )
    if (trainer.state.global_step > 0 or has_moved) and "init_adapter" not in given:
        allowed = "a model with an untrained adapter"
        fix = "Save the adapter, and give its folder as init_adapter=..."
        faults.append(Fault("trainer.model", "one with a trained adapter", allowed, fix))
    return faults
