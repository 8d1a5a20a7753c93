"""Settings of other releases and other classes: what has become of each, and where it belongs here.

Whoever brings a script from Trainer or TRL meets these names first; "unexpected keyword" would send them searching.
Names that nobody knows are refused in the same words, with the one that is nearest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from peft_mux.errors import Fault, closest, raise_faults, shown

_ON_TASK = "it belongs to each Task"
_RENAMED = {
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "max_seq_length": "max_length",
    "group_by_length": "nothing: sequences are packed, so their lengths need no grouping",
    "overwrite_output_dir": "nothing: go on with a run by train(resume_from_checkpoint=True), or give a new folder",
    "save_safetensors": "nothing: safetensors are all that is written",
    "warmup_ratio": "warmup_steps, which is a share of all steps where it is below 1",
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_organization": 'hub_model_id="organization/name"',
    "push_to_hub_token": "hub_token",
    "half_precision_backend": "bf16",
    "fp16_backend": "bf16",
    "fp16_opt_level": "bf16",
    "include_tokens_per_second": "nothing: it is logged as run/tokens_per_second",
    "include_inputs_for_metrics": "include_for_metrics",
    "adafactor": 'optim="adafactor"',
    "fsdp_min_num_params": "shard_backbone",
    "fsdp_transformer_layer_cls_to_wrap": "shard_backbone",
    "use_mps_device": "nothing: the accelerator that is there is used",
    "torchdynamo": "nothing: compile modules of the backbone (layer.mlp.compile())",
    "dispatch_batches": "nothing: rows are packed and given out by the trainer",
    "split_batches": "nothing: rows are packed and given out by the trainer",
    "eval_packing": "nothing: held-out rows are packed, too",
    "tokenizer": "processing_class of the trainer",
    **dict.fromkeys(
        "past_index ray_scope mp_parameters jit_mode_eval use_ipex tpu_num_cores tpu_metrics_debug xpu_backend".split(),
        "nothing: transformers 5 has dropped it",
    ),
}
"""Names that transformers 5 or TRL no longer have, and what stands for them here."""
_OF_SFT = {
    "packing": "nothing: all sequences are packed, without attention between them",
    "packing_strategy": "nothing: all sequences are packed, without attention between them",
    "padding_free": "nothing: nothing is padded",
    "pad_to_multiple_of": "pad_to_chunks and chunk_size of the arguments",
    "dataset_text_field": 'row_format={"text": "your column"} of each Task',
    "dataset_num_proc": "nothing: rows are tokenised once, in one process",
    "dataset_kwargs": "nothing: rows that have input_ids are taken as they are",
    "shuffle_dataset": f"shuffle: {_ON_TASK}",
    "completion_only_loss": f"completion_only_loss: {_ON_TASK}",
    "assistant_only_loss": f"assistant_only_loss: {_ON_TASK}",
    "chat_template_path": f"chat_template, the template itself: {_ON_TASK}",
    "loss_type": f"loss_type: {_ON_TASK}",
    "beta": 'objective_args={"beta": ...} of each Task',
    "model_init_kwargs": "model_init_kwargs of the trainer",
    "trust_remote_code": 'model_init_kwargs={"trust_remote_code": True} of the trainer',
    "eos_token": "the tokenizer: set it there and give it as processing_class",
    "pad_token": "nothing: nothing is padded",
    "activation_offloading": "activation_checkpointing",
    "router_aux_loss_coef": "nothing: routers are frozen, and balanced as they are",
    "truncation_mode": 'overlong_policy="truncate", which keeps the start',
    "use_liger_kernel": "nothing: it replaces the layers that are multiplexed",
}
"""Names of `SFTConfig` and `DPOConfig`, and where they belong here."""
_OF_EACH_TASK = (
    "name peft_config train_dataset eval_dataset train_batch_size shuffle num_labels compute_metrics callbacks "
    "priority preprocess_logits_for_metrics eval_generate early_stopping objective objective_args row_format "
    "chat_template"
).split()
_OF_ARGS = {
    "lr": "learning_rate",
    "batch_size": "per_device_train_batch_size, or train_batch_size of each Task",
    **dict.fromkeys("epochs num_epochs".split(), "num_train_epochs"),
    "steps": "max_steps",
    "model": "model of the trainer",
    "processing_class": "processing_class of the trainer",
    **{name: f"{name}: {_ON_TASK}" for name in _OF_EACH_TASK},
}
"""Names of settings that are none of the arguments of a run, and where they belong."""
OF_THE_ADAPTER = {
    **dict.fromkeys("r rank lora_r lora_rank".split(), "r"),
    **dict.fromkeys("alpha lora_alpha".split(), "lora_alpha"),
    **dict.fromkeys("dropout lora_dropout".split(), "lora_dropout"),
    **dict.fromkeys("target_modules lora_target_modules".split(), "target_modules"),
}
"""What an adapter's settings are called, and the field of `LoraConfig` that is meant."""
_OF_THE_RUN = (
    "output_dir bf16 logging_steps logging_strategy save_strategy save_total_limit report_to run_name "
    "gradient_checkpointing activation_checkpointing eval_strategy disable_tqdm resume_from_checkpoint planner "
    "memory_limit_gib max_tokens_per_micro_batch overlong_policy"
).split()
_OF_TASK = {
    "max_seq_length": "max_length",
    "per_device_train_batch_size": "train_batch_size, the sequences of an optimizer step over all processes",
    "gradient_accumulation_steps": "train_batch_size, the sequences of an optimizer step over all processes",
    "warmup_ratio": "warmup_steps, which is a share of all steps where it is below 1",
    "tokenizer": "processing_class of the trainer",
    "processing_class": "processing_class of the trainer",
    "formatting_func": "row_format, or map the rows before",
    "args": "the settings themselves: learning_rate, max_steps, ... or Task.from_sft_config",
    **{name: f"peft_config=LoraConfig({field}=...)" for name, field in OF_THE_ADAPTER.items()},
    **dict.fromkeys("peft config lora_config adapter".split(), "peft_config"),
    "lr": "learning_rate",
    "batch_size": "train_batch_size",
    **dict.fromkeys("epochs num_epochs".split(), "num_train_epochs"),
    "steps": "max_steps",
    **dict.fromkeys("dataset data train_data".split(), "train_dataset"),
    **dict.fromkeys("eval_data valid_dataset validation_dataset".split(), "eval_dataset"),
    **dict.fromkeys(_OF_THE_RUN, "MultiTaskTrainingArguments, as it is one for the run"),
    **{name: where for name, where in _OF_SFT.items() if _ON_TASK not in where},
}


def belongs(name: str, *, on_task: bool = False) -> str:
    """Return where a setting belongs that is not known where it stands; "" where nothing is known of it either.

    Args:
        name: name of the setting.
        on_task: whether it was set on a task rather than on the arguments of a run.
    """
    where = (_OF_TASK if on_task else {**_OF_ARGS, **_OF_SFT, **_RENAMED}).get(name, "")
    return f"Use {where}." if where else ""


def refuse_unknown(given: Mapping[str, Any], known: Iterable[str], where: str, needed: Iterable[str] = ()) -> None:
    """Refuse settings that there are not, and those that are missing.

    Args:
        given: the settings by name.
        known: names of those that there are.
        where: what they were set on, for messages: "args", "tasks.sql".
        needed: names of those that must be given.

    Raises:
        ConfigError: naming each, and where it belongs or what was meant.
    """
    there = tuple(known)
    faults = [
        Fault(f"{where}.{name}", shown(value), "a setting of this class", _meant(name, there, on_task=where != "args"))
        for name, value in given.items()
        if name not in there
    ]
    faults += [
        Fault(f"{where}.{name}", "nothing", "a value, as it has no default") for name in needed if name not in given
    ]
    raise_faults(faults)


def _meant(name: str, known: Iterable[str], *, on_task: bool) -> str:
    return belongs(name, on_task=on_task) or closest(name, known) or "Take it out."
