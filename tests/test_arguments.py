"""`MultiTaskTrainingArguments`: what is refused by name, and the way to a dict and back."""

from __future__ import annotations

import json
import math
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import HfArgumentParser, TrainingArguments

from peft_mux.arguments import HARMLESS, HONOURED, SETTABLE_FIELDS, MultiTaskTrainingArguments
from peft_mux.cli.config_file import schema
from peft_mux.errors import ConfigError, shown
from peft_mux.task import Task
from peft_mux.trainer.trainer import MultiTaskTrainer
from tests.invariants.mux_lab import tiny_llama
from tests.runs import trainer_of
from tests.test_task import ANYTHING

ROWS = [{"input_ids": [1, 2, 3]}]


def arguments(**settings: Any) -> MultiTaskTrainingArguments:
    return MultiTaskTrainingArguments(**{"output_dir": "unused", "use_cpu": True, **settings})


def refusal(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        arguments(**settings)
    return str(caught.value)


def task(**settings: Any) -> Task:
    return Task(name="own", peft_config=LoraConfig(r=4), train_dataset=ROWS, **settings)


# -------------------------------------------------------------------- refused


def test_every_field_is_either_settable_or_refused_when_it_is_changed() -> None:
    """No inherited field may be accepted and ignored, not even one that a later transformers brings."""
    inherited = {name for name, item in TrainingArguments.__dataclass_fields__.items() if item.init}
    refused = inherited - SETTABLE_FIELDS
    assert {"fp16", "fsdp", "auto_find_batch_size", "data_seed"} <= refused
    assert not {*HONOURED} & {*HARMLESS}
    assert arguments(fp16=False, push_to_hub=False, dataloader_num_workers=0).fp16 is False, "its default is no change"
    strange = object()
    for name in sorted(refused - {"ddp_backend"}):
        assert re.search(rf"args\.{name} must be .*, got {re.escape(repr(strange))}", refusal(**{name: strange}))
    for name, value, reason in (
        ("fp16", True, "use bf16"),
        ("auto_find_batch_size", True, "max_tokens_per_micro_batch"),
        ("torch_compile", True, "use_liger_kernel fuses"),
        ("deepspeed", {"stage": 3}, "shard_backbone, or the two parallel sizes"),
        ("ignore_data_skip", True, "resuming is exact"),
    ):
        message = refusal(**{name: value})
        assert message.startswith(f"args.{name} must be its default ")
        assert f", got {value!r}" in message
        assert reason in message


HARMLESS_VALUES = {
    "ddp_bucket_cap_mb": 25,
    "dataloader_num_workers": 4,
    "dataloader_prefetch_factor": 2,
    "dataloader_multiprocessing_context": "spawn",
    "eval_accumulation_steps": 4,
    "length_column_name": "size",
    "remove_unused_columns": False,
    "dataloader_pin_memory": False,
    "dataloader_in_order": False,
    "logging_nan_inf_filter": False,
    "skip_memory_metrics": False,
}


@pytest.mark.slow
def test_harmless_fields_pass_and_change_no_result(tmp_path: Path) -> None:
    given = {name: HARMLESS_VALUES.get(name, True) for name in HARMLESS}
    losses = []
    for number, settings in enumerate(({}, given)):
        own = task(eval_dataset=ROWS, max_steps=2)
        trainer = trainer_of(tmp_path / str(number), [own], save_strategy="no", **settings)
        assert {name: getattr(trainer.args, name) for name in settings} == settings
        trainer.train()
        losses.append((trainer.table["own"].last_loss, trainer.evaluate()))
    assert losses[0] == losses[1]


ELSEWHERE = {
    "do_train do_eval do_predict": "flags that only the user's script reads, as Trainer documents",
    "project trackio_space_id trackio_bucket_id trackio_static_space_id run_name logging_dir": "loggers of report_to",
    "ddp_timeout": "read where there are several processes",
    "per_device_eval_batch_size": "read where predictions are of pairs",
    "log_level_replica": "read on replicas",
    "tf32": "TrainingArguments itself, where there is a GPU",
    "liger_kernel_config": "read where Liger runs, on a GPU",
    "hub_token hub_private_repo hub_model_id hub_revision hub_strategy hub_always_push": "uploads of push_to_hub",
    "local_rank": "the launcher's, set through the environment",
    "gradient_checkpointing gradient_checkpointing_kwargs": "older names, copied to the new ones",
}
"""Honoured fields that a run of one process without loggers has no need of, and who reads them."""


def test_every_honoured_field_is_read_by_a_run(tmp_path: Path) -> None:
    """What is accepted is not ignored: a run that logs, saves, evaluates and resumes asks for each of them."""
    read: set[str] = set()

    @dataclass
    class Watched(MultiTaskTrainingArguments):
        def __getattribute__(self, name: str) -> Any:
            frame = sys._getframe(1)
            own = "training_args.py", "argument_fields.py", "arguments.py", "dataclasses.py", "hyper_parameters.py"
            by = frame.f_code
            # Not what only completes, checks, copies or writes them, but what those properties ask for others.
            if not by.co_filename.endswith(own) or by.co_name in ("pick", "resolve", "_setup_devices", *PROPERTIES):
                read.add(name)
            return super().__getattribute__(name)

    args = Watched(
        output_dir=str(tmp_path / "run"),
        **{"use_cpu": True, "report_to": "none", "max_steps": 2, "save_steps": 1, "logging_steps": 2},
        **{"eval_strategy": "steps", "eval_steps": 1, "activation_checkpointing": True, "disable_tqdm": True},
    )
    MultiTaskTrainer(tiny_llama(), args, [task(eval_dataset=ROWS)]).train()
    known_elsewhere = {name for names in ELSEWHERE for name in names.split()}
    assert set(HONOURED) - read - known_elsewhere == set()


PROPERTIES = [name for name, item in vars(TrainingArguments).items() if isinstance(item, property)] + [
    *("uses_checkpointing", "checkpointing_kwargs", "get_process_log_level", "get_warmup_steps", "_eval_steps"),
    *("task_arguments",),
]


def test_a_number_of_steps_between_evaluations_is_refused_where_no_evaluation_goes_by_steps() -> None:
    for strategy in ("no", "epoch"):
        message = refusal(eval_steps=5, eval_strategy=strategy)
        assert message.startswith('args.eval_steps must be None, or a number with eval_strategy="steps", got 5')
        assert arguments(eval_strategy=strategy).eval_steps is None
    assert arguments(eval_steps=5, eval_strategy="steps").eval_steps == 5


BAD_VALUES: dict[str, list[Any]] = {
    "learning_rate": [10**400, None],
    "seed": [2**32],
    "per_device_train_batch_size": [0, None, "4"],
    "gradient_accumulation_steps": [0, 10**12],
    "max_tokens_per_micro_batch": [0, 1.5, "all"],
    "memory_limit_gib": [0, math.inf, True],
    "replan_gain": [-0.1, "5%"],
    "dataloader_num_workers": [-3],
    "bf16": ["yes"],
    "pad_to_chunks": ["no"],
    "output_dir": ["x" * 5000],
    "save_strategy": ["bset", ["steps"]],
    "resume_from_checkpoint": ["x" * 5000],
    "cost_profile": ["nowhere.json"],
    "report_to": ["wanbd"],
    "replicas": [5],
    "share_prefixes": ["yes", 1, None],
    "cuda_graphs": ["yes", 1, None],
    **{name: [0] for name in "logging_steps save_steps save_total_limit chunk_size min_chunk_size".split()},
    **{name: [0] for name in "per_device_eval_batch_size replan_steps ddp_timeout use_cache".split()},
    **{name: [-1] for name in "dataloader_prefetch_factor eval_accumulation_steps ddp_bucket_cap_mb".split()},
    "local_rank": [-2],
}


@pytest.mark.parametrize("field", BAD_VALUES)
def test_a_value_that_no_run_can_have_is_refused_by_field_with_what_came_and_what_is_allowed(field: str) -> None:
    for value in BAD_VALUES[field]:
        message = refusal(**{field: value})
        assert message.startswith(f"args.{field} must be ")
        assert f", got {shown(value)}." in message
        assert len(message.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "field", [name for name, item in MultiTaskTrainingArguments.__dataclass_fields__.items() if item.init]
)
def test_any_value_in_any_field_gives_arguments_or_a_config_error(field: str) -> None:
    messages = []
    for value in ANYTHING:
        try:
            arguments(**{field: value})
        except ConfigError as error:
            messages.append(str(error))
    assert messages, "no field takes everything"
    assert all(f"args.{field}" in message for message in messages)


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("evaluation_strategy", "Use eval_strategy."),
        ("lr", "Use learning_rate."),
        ("learning_rte", 'Did you mean "learning_rate"?'),
        ("train_batch_size", "Use train_batch_size"),
        ("warmup_ratio", "Use warmup_steps, which is a share"),
        ("no_cuda", "Use use_cpu."),
        ("max_seq_length", "Use max_length."),
        ("padding_free", "all sequences are packed"),
        ("packing", "Use packing: it belongs to each Task."),
        ("dataset_text_field", 'row_format={"text": "your column"} of each Task'),
        ("assistant_only_loss", "it belongs to each Task"),
        ("tokenizer", "processing_class of the trainer"),
    ],
)
def test_names_of_other_releases_and_classes_say_where_they_belong(name: str, where: str) -> None:
    message = refusal(**{name: 1})
    assert message.startswith(f"args.{name} must be a setting of this class, got 1. ")
    assert where in message


# -------------------------------------------------------------- to a dict and back


def test_arguments_go_to_a_dict_and_back() -> None:
    own = {"max_length": 96, "overlong_policy": "drop", "chunk_size": 32, "pad_to_chunks": True}
    first = arguments(optim="sgd", lr_scheduler_type="cosine", eval_strategy="steps", eval_steps=3, **own)
    written = json.loads(json.dumps(first.to_dict()))
    second = MultiTaskTrainingArguments(**{name: written[name] for name in SETTABLE_FIELDS if name in written})
    assert second.to_dict() == first.to_dict()
    assert {name: written[name] for name in own} == own
    assert json.loads(second.to_json_string()) == json.loads(first.to_json_string())


def test_a_script_that_parses_the_arguments_of_trainer_may_make_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    before = schema()
    for item in TrainingArguments.__dataclass_fields__.values():
        monkeypatch.setattr(item, "type", item.type)  # the parser writes into fields that all classes share
    HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(["--output_dir", "theirs"])  # type: ignore[arg-type]
    assert arguments().output_dir == "unused"
    assert "must be True or False" in refusal(bf16="yes")
    assert schema() == before


SWITCHES = {"share_prefixes", "use_liger_kernel", "cuda_graphs", "interleaved_passes"}


@pytest.mark.parametrize(
    ("line", "parsed"),
    [
        ("", {}),
        ("--share-prefixes --use_liger_kernel auto", {"share_prefixes": True}),
        (
            "--use_liger_kernel false --share_prefixes True",
            {"use_liger_kernel": False, "share_prefixes": True},
        ),
        ("--interleaved_passes 2 --chunk_size 64 --bf16", {"interleaved_passes": 2, "chunk_size": 64, "bf16": True}),
    ],
)
def test_a_command_line_sets_the_arguments_of_a_run(
    line: str, parsed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for item in MultiTaskTrainingArguments.__dataclass_fields__.values():
        monkeypatch.setattr(item, "type", item.type)
    given = ["--output_dir", "unused", "--use_cpu", *line.split()]
    (made,) = HfArgumentParser(MultiTaskTrainingArguments).parse_args_into_dataclasses(given)  # type: ignore[arg-type]
    assert {name: getattr(made, name) for name in SWITCHES | parsed.keys()} == {
        **dict.fromkeys(SWITCHES, "auto"),
        **parsed,
    }


def test_the_best_model_is_that_of_the_least_loss_unless_a_metric_is_named() -> None:
    assert arguments(load_best_model_at_end=True).metric_for_best_model == "loss"
    assert arguments(load_best_model_at_end=True, metric_for_best_model="score").metric_for_best_model == "score"
    assert arguments().metric_for_best_model is None


def test_a_machine_without_accelerator_gets_the_cpu_even_with_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    made = MultiTaskTrainingArguments(output_dir="unused", bf16=True)
    assert made.use_cpu
    assert made.device.type == "cpu"


def test_inputs_are_not_recomputed_apart_from_whole_layers() -> None:
    message = refusal(selective_recompute=True, gradient_checkpointing=True)
    assert "args.selective_recompute must be False if whole layers are recomputed, got True with" in message


@pytest.mark.parametrize("given", [{"pipeline_parallel_size": 2}, {"replicas": "<1,2>"}, {}])
def test_stages_have_as_many_queues_of_the_gpu_as_streams(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setenv(name, "8")
    arguments(**given)
    assert os.environ[name] == "8"
    monkeypatch.delenv(name)
    arguments(**given)
    assert os.environ.get(name) == ("32" if given else None)


def test_the_precision_of_accelerate_launch_is_used_as_trainer_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert not arguments().bf16, "without the launcher, the variable may be left over from another object"
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    assert arguments().bf16
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert not arguments().bf16
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    with pytest.raises(ConfigError, match="accelerate launch --mixed_precision must be bf16 or no, got fp16"):
        arguments()
    assert arguments(bf16=True).bf16, "what a script sets itself comes first, as in Trainer"
