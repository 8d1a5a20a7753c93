"""From TRL's configurations and trainers to tasks: each field is carried over, has no effect, or is refused by name."""

from __future__ import annotations

import copy
import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import AdaLoraConfig, LoraConfig, get_peft_model
from transformers import TrainingArguments

from peft_mux.arguments import SETTABLE_FIELDS, MultiTaskTrainingArguments
from peft_mux.errors import ConfigError
from peft_mux.from_trl import CARRIED, NO_EFFECT
from peft_mux.task import TASK_FIELDS, Task
from tests.invariants import mux_lab
from tests.trl import trl_lab as lab
from tests.trl.test_routers import COMPLETIONS, mixture

trl = pytest.importorskip("trl")

ROLLOUTS = [{"input_ids": [3, 4, 5], "labels": [-100, 4, 5], "advantages": 1.0}] * 4
ROWS: Mapping[str, list[dict[str, Any]]] = {
    "SFTConfig": [{"text": "the sky", "body": "the grass"}] * 4,
    "DPOConfig": lab.pairs(4),
    "ORPOConfig": lab.pairs(4),
    "CPOConfig": lab.pairs(4),
    "KTOConfig": lab.answers(4),
    "RewardConfig": lab.pairs(4),
    "GRPOConfig": ROLLOUTS,
}
OTHER_VALUES: Mapping[str, Any] = {
    "max_steps": 7,
    "optim": "sgd",
    "lr_scheduler_type": "cosine",
    "lr_scheduler_kwargs": {"num_cycles": 2},
    "optim_args": "momentum=0.9",
    "chat_template_path": "no such file",
    "metric_for_best_model": "loss",
    "eval_strategy": "epoch",
    "max_length": 77,
    "truncation_mode": "keep_end",
    "f_divergence_type": "js_divergence",
    "importance_sampling_level": "sequence",
    "loss_weights": [2.0],
    "dataset_text_field": "body",
    "hub_model_id": "someone/something",
}
LOSSES = {"DPOConfig": ["ipo"], "GRPOConfig": "bnpo", "SFTConfig": "chunked_nll", "CPOConfig": "hinge"}


def configurations() -> Iterator[type]:
    """Yield each configuration of a trainer that the installed TRL has, those of its experiments included."""
    import trl.experimental

    names = [f"trl.experimental.{one.name}" for one in pkgutil.iter_modules(trl.experimental.__path__)]
    found = {}
    for module in [trl, *_imported(names)]:
        for name in dir(module):
            kind = getattr(module, name)
            if isinstance(kind, type) and issubclass(kind, TrainingArguments) and kind.__module__.startswith("trl."):
                found[f"{module.__name__}.{name}"] = kind
    yield from (kind for _, kind in sorted(found.items()))


def _imported(names: list[str]) -> Iterator[Any]:
    for name in names:
        try:
            yield importlib.import_module(name)
        except (ImportError, RuntimeError):  # an experiment whose libraries are absent
            continue


TYPES = {kind.__name__: kind for kind in configurations()}
OFFERED = {name: kind for name, kind in TYPES.items() if name in ROWS}


def config_of(kind: type, folder: Path, **settings: Any) -> Any:
    own = {"output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": "none"}
    return kind(**{**own, **settings})


def task_of(config: Any, name: str, **settings: Any) -> Task:
    adapter = LoraConfig(r=2, lora_dropout=0.1, task_type="SEQ_CLS" if name == "RewardConfig" else "CAUSAL_LM")
    rows = ROWS[name]
    return Task.from_sft_config("own", config, train_dataset=rows, eval_dataset=rows, peft_config=adapter, **settings)


def contents(task: Task) -> dict[str, Any]:
    found = {name: getattr(task, name) for name in TASK_FIELDS}
    return {**found, "peft_config": task.peft_config.to_dict()}


def another(name: str, value: Any, kind: str) -> Any:
    """Return a value for a field that is not its default."""
    if name == "loss_type":
        return LOSSES.get(kind, "no such loss")
    if name == "train_sampling_strategy":
        return "random" if value == "sequential" else "sequential"
    if name in OTHER_VALUES:
        return OTHER_VALUES[name]
    if isinstance(value, bool) or value is None:
        return not value if isinstance(value, bool) else 0.25
    return value + 1 if isinstance(value, int) else value / 2 + 0.01 if isinstance(value, float) else "another"


@pytest.mark.parametrize("name", OFFERED)
def test_no_field_of_a_configuration_is_lost(name: str, tmp_path: Path) -> None:
    plain = config_of(OFFERED[name], tmp_path)
    unchanged = contents(task_of(plain, name))
    carried, wrong = set(), []
    for item in [item for item in fields(plain) if item.init]:
        config = copy.copy(plain)
        setattr(config, item.name, another(item.name, getattr(plain, item.name), name))
        try:
            has_changed = contents(task_of(config, name)) != unchanged
        except ConfigError as error:
            wrong += [] if item.name in str(error) else [f"{item.name} is refused by another name: {error}"]
            continue
        is_of_run = item.name in SETTABLE_FIELDS - CARRIED
        has_no_effect = item.name in NO_EFFECT or is_of_run or (item.name, name) in WITHOUT_EFFECT
        if has_changed == has_no_effect:
            wrong.append(f"{item.name} is {'carried over' if has_changed else 'lost'}")
        carried |= {item.name} if has_changed else set()
    assert wrong == []
    assert {"learning_rate", "seed", "per_device_train_batch_size"} <= carried
    assert "max_length" in carried or not hasattr(plain, "max_length")


WITHOUT_EFFECT = {
    ("loss_type", "SFTConfig"),  # "chunked_nll" is the same loss
    ("eval_steps", "SFTConfig"),
    *(("eval_steps", name) for name in ROWS),  # not read unless eval_strategy is "steps"
    *(("eval_strategy", name) for name in ROWS),  # each epoch is the run's
    ("max_completion_length", "GRPOConfig"),  # a bound on what is generated
}


@pytest.mark.parametrize("kind", [kind for kind in configurations() if kind.__name__ not in ROWS])
def test_a_configuration_whose_loss_is_not_offered_is_refused_by_its_class(kind: type, tmp_path: Path) -> None:
    config = object.__new__(kind)  # some want servers before they can be made
    with pytest.raises(ConfigError, match=rf"config must be SFTConfig, DPOConfig.*got {kind.__name__}"):
        Task.from_sft_config("own", config, train_dataset=ROLLOUTS, peft_config=LoraConfig())


def test_packing_and_sampling_are_carried_over_as_far_as_they_are_the_same_here(tmp_path: Path) -> None:
    config = config_of(OFFERED["SFTConfig"], tmp_path, train_sampling_strategy="group_by_length")
    assert task_of(config, "SFTConfig").shuffle == "group_by_length"
    config = config_of(OFFERED["SFTConfig"], tmp_path, dataloader_drop_last=True, gradient_accumulation_steps=2)
    with pytest.raises(ConfigError, match=r"config\.dataloader_drop_last must be False with gradient_acc"):
        task_of(config, "SFTConfig")
    config = config_of(OFFERED["SFTConfig"], tmp_path, packing=True, packing_strategy="bfd_split")
    with pytest.raises(ConfigError, match=r"config\.packing_strategy must be 'bfd', got 'bfd_split'.*from_trainer"):
        task_of(config, "SFTConfig")
    assert task_of(config, "SFTConfig", packing=False).packing is False
    config.packing_strategy = "bfd"
    assert task_of(config, "SFTConfig").packing is True


def test_a_configuration_of_your_own_counts_as_the_one_it_is_derived_from(tmp_path: Path) -> None:
    class OwnConfig(OFFERED["DPOConfig"]):  # type: ignore[misc, name-defined]
        pass

    task = task_of(config_of(OwnConfig, tmp_path, beta=0.5, loss_type=["sigmoid", "sft"]), "DPOConfig", max_length=33)
    assert (task.objective, task.loss_type, task.objective_args) == ("dpo", ["sigmoid", "sft"], {"beta": 0.5})
    assert task.max_length == 33
    assert task.peft_config.lora_dropout == 0, "TRL switches dropout off"


# ------------------------------------------------------------------------------------------------------------- trainers

TRAINERS: Mapping[str, tuple[str, list[dict[str, Any]], dict[str, Any]]] = {
    "DPO": ("trl", lab.pairs(), {"loss_type": ["robust"], "beta": 0.5, "label_smoothing": 0.2, "ld_alpha": 0.5}),
    "ORPO": ("trl.experimental.orpo", lab.pairs(), {"beta": 0.3}),
    "KTO": ("trl", lab.answers(), {"desirable_weight": 0.7, "beta": 0.4}),
    "Reward": ("trl", lab.pairs(), {"center_rewards_coefficient": 0.1}),
    "SFT packed": ("trl", lab.answers(), {"packing": True, "max_length": 16, "packing_strategy": "bfd_split"}),
    "DPO of a PeftModel": ("trl", lab.pairs(), {"beta": 0.5}),
    "SFT of a stream": ("trl", COMPLETIONS * 4, {}),
    "SFT of a mixture": ("trl", COMPLETIONS, {}),
    "SFT of a mixture with a coefficient": ("trl", COMPLETIONS, {"router_aux_loss_coef": 0.2}),
}


def trainer_of(name: str, folder: Path) -> Any:
    module, rows, options = TRAINERS[name]
    own, kind = importlib.import_module(module), name.split()[0]
    config = lab.config_of(getattr(own, f"{kind}Config"), folder, **options)
    is_classifier = name == "Reward"
    model, adapter = lab.backbone(is_classifier=is_classifier), lab.adapter(is_classifier=is_classifier)
    is_made = "PeftModel" in name  # TRL adds a second adapter, the reference
    dataset = Dataset.from_list([dict(row) for row in rows])
    return getattr(own, f"{kind}Trainer")(
        model=get_peft_model(model, adapter) if is_made else model,
        args=config,
        train_dataset=dataset.to_iterable_dataset() if "stream" in name else dataset,
        processing_class=copy.deepcopy(lab.tokenizer()),
        peft_config=None if is_made else adapter,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
def test_a_task_made_of_a_trainer_of_trl_ends_with_its_weights(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "mixture" in name:
        monkeypatch.setattr(lab, "_language_model", lambda: mixture("mixtral"))
    trainer, is_classifier = trainer_of(name, tmp_path), name == "Reward"
    task = Task.from_trainer("own", trainer)
    ours = lab.our_outcomes([task], tmp_path, is_classifier=is_classifier)["own"]
    trained = lab.trained_parameters(trainer.model)
    with torch.no_grad():
        for key, parameter in trained.items():
            parameter.copy_(ours.initial[key])
    trainer.train()
    for key, weight in trained.items():
        assert mux_lab.relative(ours.weights[key], weight.detach()) <= 1e-4, key
    assert any(mux_lab.relative(weight.detach(), ours.initial[key]) > 1e-3 for key, weight in trained.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda trainer: setattr(trainer, "compute_loss_func", print), r"trainer\.compute_loss must be the loss of"),
        (lambda trainer: setattr(trainer, "ref_model", trainer.model), r"trainer\.ref_model must be None, which is"),
        (lambda trainer: setattr(trainer, "data_collator", print), r"trainer\.data_collator must be one of"),
        (
            lambda trainer: vars(trainer.args).update(packing=True, packing_strategy="wrapped"),
            r"trainer\.args\.packing_strategy must be 'bfd' or 'bfd_split', because .*got 'wrapped'",
        ),
        (lambda trainer: trainer.create_optimizer_and_scheduler(3), r"trainer\.optimizer must be None, got your own"),
        (
            lambda trainer: (
                setattr(trainer.state, "global_step", 3),
                setattr(trainer.model.peft_config["default"], "init_lora_weights", "gaussian"),
            ),
            r"trainer\.model must be a model with an untrained",
        ),
        (
            lambda trainer: setattr(trainer, "args", TrainingArguments(trainer.args.output_dir, use_cpu=True)),
            r"trainer\.args must be the configuration of a DPOTrainer, got TrainingArguments",
        ),
        (
            lambda trainer: [item.data.fill_(1) for name, item in trainer.model.named_parameters() if "lora_B" in name],
            r"trainer\.model must be a model with an untrained adapter, got one with a trained",
        ),
        (
            lambda trainer: trainer.model.add_adapter("ref", LoraConfig(target_modules=["q_proj"])),
            r"trainer\.model must be .* with default, ref\. Take the others out: model\.delete_adapter",
        ),
        (
            lambda trainer: trainer.model.peft_config.update(default=AdaLoraConfig(total_step=9)),
            r"trainer\.model\.peft_config must be one of .*got AdaLoraConfig.*Nearest: LORA",
        ),
    ],
)
def test_what_a_trainer_would_train_in_another_way_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    trainer = trainer_of("DPO", tmp_path)
    change(trainer)
    with pytest.raises(ConfigError, match=message):
        Task.from_trainer("own", trainer)


# -------------------------------------------------------------------------------------------------------- command lines

_LORA = "--use_peft --lora_r 32 --lora_alpha 16"
_QLORA = "--use_peft --load_in_4bit --lora_target_modules all-linear --lora_r 16 --lora_alpha 16"
_SFT = "SFTConfig --num_train_epochs 1 --per_device_train_batch_size 2 --gradient_accumulation_steps"
_SFT_SCRIPT = f"{_SFT} 8 --packing --eos_token <|im_end|> --eval_strategy steps --eval_steps 100 --push_to_hub"
_DPO = "DPOConfig --per_device_train_batch_size 2 --gradient_accumulation_steps"
_DPO_SCRIPT = f"{_DPO} 8 --num_train_epochs 1 --max_steps 1000 --eval_strategy steps --eval_steps 50"
_KTO = (
    "KTOConfig --num_train_epochs 1 --learning_rate 5e-7 --lr_scheduler_type=cosine --gradient_accumulation_steps 1 "
    "--eval_steps 500 --warmup_steps 0.1 --logging_first_step --per_device_train_batch_size"
)
_PAIRS = (
    "--per_device_train_batch_size 4 --max_steps 1000 --gradient_accumulation_steps 1 --eval_steps 500 "
    "--warmup_steps 150 --logging_first_step --no_remove_unused_columns --learning_rate"
)
_REWARD = (
    "RewardConfig --per_device_train_batch_size 8 --num_train_epochs 1 --eval_strategy steps --eval_steps 50 "
    "--max_length 2048 --learning_rate"
)
_GRPO = "GRPOConfig --max_completion_length 1024 --log_completions"
_GSPO = (
    f"{_GRPO} --learning_rate 1e-5 --per_device_train_batch_size 8 --num_generations 8 --importance_sampling_level "
    "sequence --epsilon 3e-4 --epsilon_high 4e-4 --beta 0.0 --loss_type grpo --gradient_accumulation_steps 2 "
    "--steps_per_generation 8 --use_peft --lora_target_modules q_proj, v_proj"
)
_PEFT_SFT = (
    "SFTConfig --seed 100 --add_special_tokens False --splits train,test --num_train_epochs 1 --logging_steps 5 "
    "--log_level info --logging_strategy steps --eval_strategy epoch --save_strategy epoch --bf16 True --packing True "
    "--learning_rate 1e-4 --lr_scheduler_type cosine --weight_decay 1e-4 --warmup_steps 0 --max_grad_norm 1.0 "
    "--gradient_checkpointing True --dataset_text_field content --use_peft_lora True --lora_r 8 --lora_alpha 16"
)
_PEFT_HUB = f"{_PEFT_SFT} --max_length 2048 --push_to_hub --hub_private_repo True --hub_strategy every_save"
_PEFT_MATH = (
    "--bf16 True --num_train_epochs 1 --logging_steps 1 --save_strategy steps --save_steps 1000 --save_total_limit 1 "
    "--weight_decay 0. --warmup_steps 0.03"
)
_TEACHER = "--learning_rate 2e-5 --per_device_train_batch_size 4 --gradient_accumulation_steps 8 --num_train_epochs 1"
_ONLINE = "OnlineDPOConfig --learning_rate 5.0e-7 --warmup_steps 0.1 --reward_model_path path"
COMMAND_LINES = [
    # TRL: scripts and documentation
    f"{_SFT_SCRIPT} --learning_rate 2.0e-5",
    f"{_SFT_SCRIPT} --learning_rate 2.0e-4 {_LORA}",
    "SFTConfig --dataset_name trl-lib/Capybara",
    f"SFTConfig {_LORA}",
    f"SFTConfig {_LORA} --lora_dropout 0.05",
    f"SFTConfig {_LORA} --lora_dropout 0.05 --lora_target_modules q_proj v_proj",
    f"SFTConfig {_LORA} --load_in_8bit",
    f"SFTConfig {_LORA} --load_in_4bit --per_device_train_batch_size 1 --gradient_accumulation_steps 16",
    "SFTConfig --load_in_4bit --use_peft --lora_r 32",
    f"{_SFT} 8 --learning_rate 2.0e-4 {_LORA}",
    f"{_SFT} 16 --learning_rate 2.0e-5 --packing --use_peft --lora_r 256 --lora_alpha 16 --push_to_hub",
    f"{_SFT} 16 --learning_rate 2.0e-5 --packing --eval_strategy no --use_peft --lora_r 256 --lora_alpha 16",
    "SFTConfig --learning_rate 2e-4 --max_steps 100 --packing --packing_strategy wrapped --logging_steps 10",
    f"{_SFT} 1 --packing --dataset_num_proc 12 --max_length 4096 --logging_steps 1 --warmup_steps 0.03 --seed 42 "
    '--lr_scheduler_type cosine_with_min_lr --lr_scheduler_kwargs {"min_lr_rate":0.1} --run_name 20b-full-eager',
    "SFTConfig --max_length 128 --per_device_train_batch_size 1 --gradient_accumulation_steps 4 --num_train_epochs 1 "
    "--learning_rate 2e-4 --optim paged_adamw_8bit --logging_steps 10 --use_peft --lora_r 8 --lora_alpha 16",
    "SFTConfig --gradient_accumulation_steps 8",
    "SFTConfig --use_peft --gradient_checkpointing",
    f"SFTConfig --per_device_train_batch_size 1 --gradient_accumulation_steps 1 {_LORA} --lora_target_modules o_proj,",
    f"{_DPO_SCRIPT} --no_remove_unused_columns --learning_rate 5.0e-7",
    f"{_DPO_SCRIPT} --no_remove_unused_columns --learning_rate 5.0e-6 {_LORA}",
    f"{_DPO} 8 --learning_rate 5.0e-6 {_LORA}",
    f"{_DPO} 32 --dataset_num_proc 32 --use_peft --lora_target_modules all-linear",
    f"{_DPO} 32 --dataset_streaming --max_steps 100 --dataset_num_proc 32 --use_peft --lora_target_modules all-linear",
    "DPOConfig --per_device_train_batch_size 4 --per_device_eval_batch_size 4 --gradient_accumulation_steps 8 "
    "--dataset_num_proc 1 --loss_type sigmoid bco_pair sft --loss_weights 0.8 0.2 1.0",
    "KTOConfig --num_train_epochs 1",
    f"{_KTO} 16",
    f"{_KTO} 8 {_QLORA}",
    "ORPOConfig --num_train_epochs 1",
    f"ORPOConfig {_PAIRS} 8e-6",
    f"ORPOConfig {_PAIRS} 8e-5 --optim rmsprop {_LORA}",
    "CPOConfig --num_train_epochs 1",
    f"CPOConfig {_PAIRS} 8e-6",
    f"CPOConfig {_PAIRS} 8e-5 --optim rmsprop {_LORA}",
    f"{_REWARD} 1.0e-5",
    f"{_REWARD} 1.0e-4 {_LORA} --lora_task_type SEQ_CLS",
    f"{_GRPO} True --push_to_hub True --use_vllm True --vllm_mode colocate --max_steps 400",
    f"{_GRPO} --learning_rate 1e-5 --use_vllm --vllm_mode colocate --use_peft --lora_target_modules q_proj, v_proj",
    f"{_GRPO} --learning_rate 1e-5 --per_device_train_batch_size 1 --gradient_accumulation_steps 2 --num_generations 2",
    _GSPO,
    "GRPOConfig --learning_rate 1.0e-6 --lr_scheduler_type cosine --warmup_steps 0.0 --max_grad_norm 1.0 --beta 0.0 "
    "--max_completion_length 4096 --num_generations 16 --generation_batch_size 16 --gradient_accumulation_steps 8 "
    "--per_device_train_batch_size 1 --num_train_epochs 1 --vllm_mode colocate --save_strategy steps --save_steps 50 "
    "--save_total_limit 1 --logging_steps 1 --max_steps 200 --lora_r 1 --lora_alpha 32 --lora_dropout 0.0",
    "RLOOConfig --max_completion_length 1024 --per_device_train_batch_size 1 --gradient_accumulation_steps 2 "
    "--num_generations 2 --log_completions",
    f"GKDConfig {_TEACHER} --push_to_hub",
    f"GOLDConfig {_TEACHER} --teacher_model_name_or_path path",
    f"DistillationConfig {_TEACHER} --use_peft --lora_r 64 --lora_alpha 16",
    f"{_ONLINE} --push_to_hub",
    f"{_ONLINE} --per_device_train_batch_size 8 --gradient_accumulation_steps 16 --missing_eos_penalty 1.0",
    "TPOConfig --beta 0.01 --tpo_alpha 1.0 --learning_rate 5e-7 --num_train_epochs 1",
    "SDPOConfig --learning_rate 5e-5 --bf16 true --max_completion_length 128 --num_generations 8 --save_strategy no "
    "--per_device_train_batch_size 1 --gradient_accumulation_steps 2 --generation_batch_size 32",
    # PEFT
    f"{_PEFT_HUB} --per_device_train_batch_size 8 --gradient_accumulation_steps 8 --use_4bit_quantization True",
    f"{_PEFT_HUB} --per_device_train_batch_size 8 --gradient_accumulation_steps 4 --use_reentrant False",
    f"{_PEFT_HUB} --per_device_train_batch_size 2 --gradient_accumulation_steps 2 --bnb_4bit_compute_dtype bfloat16",
    f"{_PEFT_SFT} --max_length 2048 --per_device_train_batch_size 8 --gradient_accumulation_steps 4",
    f"{_PEFT_SFT} --max_seq_len 2048 --per_device_train_batch_size 8 --per_device_eval_batch_size 8",
    f"TrainingArguments {_PEFT_MATH} --lr_scheduler_type cosine --corda_mode True --learning_rate 2e-5 "
    "--per_device_train_batch_size 1 --gradient_accumulation_steps 32",
    f"ScriptArguments {_PEFT_MATH} --bits nf4 --per_device_train_batch_size 32 --gradient_accumulation_steps 4",
    f"ScriptArguments {_PEFT_MATH} --bits bf16 --per_device_train_batch_size 2 --gradient_accumulation_steps 8",
    "ScriptArguments --max_length 128 --num_train_epochs 1 --per_device_train_batch_size 1 "
    "--gradient_accumulation_steps 8 --learning_rate 5e-4 --bits bf16",
]
"""Command lines of TRL's and PEFT's documented examples: the class of the configuration, and the options that train."""
REFUSED = {
    "--eos_token": r"config\.eos_token .*set it there",
    "wrapped": r"config\.packing_strategy must be .bfd., got .wrapped.*Use Task\.from_trainer",
    "--use_vllm": r"config\.use_vllm must be its default False",
    **{
        f"{name}Config": rf"config must be SFTConfig, .* got {name}Config\."
        for name in ("RLOO", "GKD", "GOLD", "Distillation", "OnlineDPO", "TPO", "SDPO")
    },
}
"""Words of command lines that are refused, and with which error."""


@dataclass
class ScriptArguments(trl.SFTConfig):  # type: ignore[misc, name-defined]
    """As scripts of PEFT extend the configuration by what they read themselves."""

    bits: str = "bf16"


@pytest.mark.parametrize("line", COMMAND_LINES)
def test_command_lines_of_documented_examples_are_converted_or_refused_with_a_remedy(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, *options = line.split()
    others = {"TrainingArguments": TrainingArguments, "ScriptArguments": ScriptArguments}
    config_type = (TYPES | others)[kind]
    for item in (*fields(config_type), *fields(trl.ModelConfig)):
        monkeypatch.setattr(item, "type", item.type)  # the parser writes into fields that all classes share
    options += ["--output_dir", str(tmp_path), "--use_cpu", "--report_to", "none"]
    parser = trl.TrlParser((config_type, trl.ModelConfig))
    config, model_config, _ = parser.parse_args_and_config(options, return_remaining_strings=True)
    rows = [{**row, "content": "a"} for row in ROWS.get(kind, ROLLOUTS)]
    task_type = "SEQ_CLS" if kind == "RewardConfig" else "CAUSAL_LM"
    adapter = LoraConfig(r=model_config.lora_r, lora_alpha=model_config.lora_alpha, task_type=task_type)
    given: dict[str, Any] = {"train_dataset": rows, "peft_config": adapter}
    if refused := [message for word, message in REFUSED.items() if word in line.split()]:
        with pytest.raises(ConfigError, match=refused[0]):
            Task.from_sft_config("own", config, **given)
        return
    task = Task.from_sft_config("own", config, **given)
    args = MultiTaskTrainingArguments.from_training_arguments(config)
    assert task.learning_rate == args.learning_rate == config.learning_rate
    assert task.train_batch_size == config.per_device_train_batch_size * config.gradient_accumulation_steps
    assert (args.save_strategy, args.bf16, args.logging_steps) == (
        config.save_strategy,
        config.bf16,
        config.logging_steps,
    )
