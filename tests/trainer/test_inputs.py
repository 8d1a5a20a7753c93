"""What a trainer refuses before it loads any weights, by task and column, and the forms in which it takes its tasks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from peft import LoraConfig, TaskType
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from peft_mux import ConfigError, DataError, MultiTaskPeftModel, MultiTaskTrainer, MultiTaskTrainingArguments, Task
from tests.invariants.mux_lab import Recorder, assert_bit_identical, make_trainer, rows, small_task, tiny_llama, train
from tests.runs import LORA, raising


def own_task(train_dataset: Any, **settings: Any) -> Task:
    options: dict[str, Any] = {"name": "own", "max_steps": 2, "peft_config": LORA, **settings}
    return Task(train_dataset=train_dataset, **options)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a model folder without weights."""
    folder = tmp_path_factory.mktemp("model")
    config = tiny_llama().config
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    words = {"<unk>": 0, "<eos>": 1, "a": 2, "b": 3, "c": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>").save_pretrained(folder)
    return str(folder)


@pytest.fixture
def described(model_folder: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a model folder without weights: reading them fails the test."""
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", raising(AssertionError("weights were loaded")))
    return model_folder


def refusal(model: Any, folder: Path, *tasks: Task, error: type[Exception] = DataError, **arguments: Any) -> str:
    with pytest.raises(error) as caught:
        make_trainer(tasks, folder / "run", model=model, **arguments)
    assert not (folder / "run").exists(), "nothing is written for a run that is refused"
    return str(caught.value)


# --------------------------------------------- rows, before any weights are read


def test_bad_rows_of_all_tasks_are_reported_at_once(described: str, tmp_path: Path) -> None:
    tasks = [
        own_task([{"txt": "a"}], name="one"),
        own_task([{"input_ids": [1, 97]}], name="two"),
        own_task(datasets.IterableDataset.from_generator(lambda: iter(())), name="three"),
    ]
    message = refusal(described, tmp_path, *tasks)
    columns = "must have the columns input_ids; prompt + completion; messages; text, got columns txt"
    assert f"tasks.one.train_dataset {columns}" in message
    assert "tasks.two.train_dataset row 0 column input_ids must be ids from 0 to 96" in message
    assert "tasks.three.train_dataset must have at least one row, got a stream without rows" in message


# ---------------------------------------------------------------- adapters, models


def test_an_unknown_target_module_is_refused_with_the_nearest_one(described: str, tmp_path: Path) -> None:
    tasks = [
        small_task("one", data_seed=1, target_modules=["q_prj", "v_proj"]),
        small_task("two", data_seed=2, target_modules=["gate_porj"]),
    ]
    for model in (described, tiny_llama()):
        message = refusal(model, tmp_path, *tasks, error=ConfigError)
        assert 'tasks.one.peft_config.target_modules must be "all-linear" or modules of LlamaForCausalLM' in message
        assert "got 'q_prj'" in message
        assert 'Did you mean "q_proj"?' in message
        assert "tasks.two.peft_config.target_modules must be " in message
        assert "got 'gate_porj'" in message
        assert 'Did you mean "gate_proj"?' in message
        assert "down_proj" in message, "what is allowed is listed"
    pattern = small_task("own", data_seed=1, target_modules="q_proj")
    assert "regular expression over full names" in refusal(described, tmp_path, pattern, error=ConfigError)
    odd = small_task("own", data_seed=1, lr_scheduler_type="cosine_with_min_lr")
    assert "lr_scheduler_type='cosine_with_min_lr'" in refusal(described, tmp_path, odd, error=ConfigError)


# --------------------------------------------------------- arguments of the trainer


def mux(*names: str) -> MultiTaskPeftModel:
    return MultiTaskPeftModel(tiny_llama(), dict.fromkeys(names, LORA), verify=False)


def of_rows(*names: str) -> dict[str, Any]:
    return {"train_dataset": {name: rows(1, 4, 5, 5) for name in names}}


OWN = small_task("own", data_seed=1)
TAGGER = LoraConfig(r=4, target_modules="all-linear", task_type=TaskType.TOKEN_CLS)
NAMES = [OWN, small_task("OWN", data_seed=1)]
KINDS = [OWN, own_task([{"input_ids": [1], "labels": [1]}], name="tags", peft_config=TAGGER)]
REFUSED: list[tuple[Callable[[], Any], dict[str, Any], str]] = [
    (lambda: "no-such-folder/at-all", {"tasks": [OWN]}, "^model .* cannot be read"),
    (lambda: 5, {"tasks": [OWN]}, "^model must be a hub id or folder.*, got"),
    (tiny_llama, {"tasks": [OWN], "model_init_kwargs": {"a": 1}}, "model_init_kwargs"),
    (tiny_llama, {"tasks": [OWN], "args": {"bf16": True}}, r"args must be MultiTaskTrainingArguments .*, got dict"),
    (tiny_llama, {"tasks": []}, "tasks must be a list of at least one Task, got an empty list"),
    (tiny_llama, {"tasks": OWN}, r"at least one Task, got a single Task.*Write \[task\]\."),
    (tiny_llama, {"tasks": {"own": OWN}}, r"got dict\. Write list\(tasks\.values\(\)\)\."),
    (tiny_llama, {"tasks": [3, "x"]}, "at least one Task, got int, str in the list"),
    (tiny_llama, {"tasks": [OWN, OWN]}, '"own" and "own"'),
    (
        tiny_llama,
        {"tasks": NAMES},
        r'tasks\.OWN\.name must be different from .*in more than case.*, got "OWN" and "own"',
    ),
    (
        tiny_llama,
        {"tasks": KINDS},
        r"tasks must be of one kind, or language-model and class.*, got token-classification tasks \(tags\) and lang",
    ),
    (
        lambda: mux("own"),
        {"tasks": [small_task("own", data_seed=1, rank=8)]},
        r"tasks\.own\.peft_config must be the configuration of the model's adapter.*Rename the task",
    ),
    (lambda: mux("one", "two"), of_rows("one"), r"exactly the tasks of the model \(one, two\)"),
    (lambda: mux("one"), of_rows("one", "two"), "exactly the tasks of the model"),
    (
        tiny_llama,
        of_rows("one"),
        r"tasks must be .*or a MultiTaskPeftModel with train_dataset=\{name: rows.*, got None",
    ),
    (tiny_llama, {"tasks": [OWN], **of_rows("own")}, "train_dataset must be left out with tasks"),
]


@pytest.mark.parametrize(("make", "given", "said"), REFUSED, ids=[said for *_, said in REFUSED])
def test_what_no_trainer_can_be_made_of_is_refused(
    make: Callable[[], Any], given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    args = MultiTaskTrainingArguments(output_dir=str(tmp_path / "run"), use_cpu=True, report_to="none")
    with pytest.raises(ConfigError, match=said):
        MultiTaskTrainer(make(), **{"args": args, **given})
    assert not (tmp_path / "run").exists(), "nothing is written for a run that is refused"


def test_arguments_of_trainer_without_meaning_are_refused_by_name_all_at_once(tmp_path: Path) -> None:
    args = MultiTaskTrainingArguments(output_dir=str(tmp_path / "run"), use_cpu=True)
    given = {"data_collator": len, "optimizers": (None, None), "compute_metrics": len, "model_init": len, "odd": 1}
    with pytest.raises(ConfigError, match="5 things are wrong") as caught:
        MultiTaskTrainer(tiny_llama(), args, [small_task("own", data_seed=1)], **given)
    for name in given:
        assert f"{name} must be left out, got " in str(caught.value)
    assert "ChunkPackingCollator" in str(caught.value), "class names are spelt as they are"


def test_arguments_of_train_and_evaluate_without_meaning_are_refused_by_name(tmp_path: Path) -> None:
    trainer = make_trainer([small_task("own", data_seed=1)], tmp_path)
    with pytest.raises(ConfigError, match="trial must be left out, got int"):
        trainer.train(trial=3)
    with pytest.raises(ConfigError, match=r"eval_dataset .*got list"):
        trainer.evaluate(eval_dataset=[1])
    with pytest.raises(
        DataError, match=r"tasks\.own\.test_dataset must have rows that all have labels and fit: .*1 of 2"
    ):
        trainer.predict("own", [{"input_ids": [1, 2]}, {"input_ids": [1]}])
    several = small_task("several", data_seed=1, eval_dataset=dict.fromkeys("ab", rows(1, 2, 4, 4)))
    with pytest.raises(ConfigError, match=r"tasks\.several\.metric_for_best_model must be .*such as eval_a_loss, got"):
        make_trainer([several], tmp_path, load_best_model_at_end=True)
    with pytest.raises(ConfigError, match="at least one Task, got a single Task"):
        trainer.register_tasks(OWN)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="callbacks must be a list of TrainerCallback objects or classes, got 3"):
        trainer.add_callback(3)  # type: ignore[arg-type]
    assert trainer.task_statuses == {"own": "waiting"}


# ------------------------------------------------------------------------- forms


def test_the_short_form_trains_every_task_of_the_model_as_the_long_form_does(tmp_path: Path) -> None:
    configs = {"one": LoraConfig(r=4, target_modules="all-linear"), "two": LoraConfig(r=2, target_modules=["q_proj"])}
    data = {"one": rows(1, 6, 8, 8), "two": rows(2, 6, 8, 8)}
    settings = {"learning_rate": 3e-3, "max_steps": 3, "per_device_train_batch_size": 2, "seed": 5}
    args = MultiTaskTrainingArguments(
        output_dir=str(tmp_path / "short"), use_cpu=True, disable_tqdm=True, save_strategy="no", **settings
    )
    recorder = Recorder(keep_weights=False)
    model = MultiTaskPeftModel(tiny_llama(), configs, seeds={"one": 5, "two": 5})
    short = MultiTaskTrainer(
        model, args, train_dataset=data, eval_dataset={"two": rows(3, 2, 5, 5)}, callbacks=[recorder]
    )
    recorder.trainer = short
    short.train()
    given = {"one": datasets.Dataset.from_list(data["one"]), "two": data["two"]}
    tasks = [Task(name=name, peft_config=configs[name], train_dataset=given[name]) for name in configs]
    long = train(tasks, tmp_path / "long", recorder=Recorder(keep_weights=False), **settings)
    assert short.table["one"].step == short.table["two"].step == 3
    assert recorder.losses == long.losses
    assert short.evaluate().keys() == {"two/eval_loss", "two/eval_perplexity"}


def test_a_stream_trains_like_the_same_rows_in_order(tmp_path: Path) -> None:
    listed = rows(4, 6, 8, 8)
    calls: list[int] = []

    def generate() -> Iterator[dict[str, Any]]:
        calls.append(1)
        yield from listed

    stream = datasets.IterableDataset.from_generator(generate)
    settings: dict[str, Any] = {"train_batch_size": 3, "max_steps": 5, "learning_rate": 3e-3, "seed": 1}
    first = train([own_task(stream, **settings)], tmp_path / "stream")
    second = train([own_task(listed, shuffle=False, **settings)], tmp_path / "list")
    assert_bit_identical(first, second, "own")
    assert len(first.losses["own"]) == 5
    assert len(calls) >= 3, "five steps of three rows are two and a half passes over six rows"
    assert first.trainer.table["own"].epoch is None


# -------------------------------------------------------------------------- plan


def test_a_plan_of_a_model_folder_reads_no_weights_and_is_as_of_loaded_ones(described: str, tmp_path: Path) -> None:
    tasks = [
        small_task("first", data_seed=1, length=12, train_batch_size=4),
        small_task("second", data_seed=2, length=20, train_batch_size=2, max_steps=5),
    ]
    trainer = make_trainer(tasks, tmp_path / "run", model=described, max_tokens_per_micro_batch=50)
    assert all(parameter.is_meta for parameter in trainer.model.parameters())
    plan = trainer.plan()
    assert make_trainer(tasks, tmp_path / "run", max_tokens_per_micro_batch=50).plan() == plan
    assert [(share.name, share.num_steps) for share in plan.shares] == [("first", 8), ("second", 5)]
    assert [share.tokens_per_step for share in plan.shares] == [10 * 12 / 3, 10 * 20 / 5]
    assert plan.htasks[0].micro_batches == math.ceil(80 / 50), "80 tokens a step in passes of at most 50"
    assert not (tmp_path / "run").exists(), "a plan writes nothing"
    # It counts the weights that there are; rotary frequencies are buffers that are held in addition.
    weights = sum(parameter.numel() * 4 for parameter in tiny_llama().parameters())
    assert weights <= plan.memory.backbone_bytes <= weights * 1.01
    own = [trainer.model.task_parameters(name).values() for name in ("first", "second")]
    trainable = [sum(parameter.numel() for parameter in parameters) for parameters in own]
    assert [share.adapter_parameters for share in plan.shares] == trainable
    assert plan.memory.adapter_bytes == sum(trainable) * 20 > 0
    parts = ("first", "second", "tokens/step", "memory (analytic estimate)", "MiB", "backbone", "on cpu")
    assert all(part in str(plan) for part in parts)


def test_a_model_that_is_nearly_the_name_of_a_folder_here_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_llama().save_pretrained(tmp_path / "small")
    monkeypatch.chdir(tmp_path)
    assert 'Did you mean "small"?' in refusal("smal", tmp_path, own_task([{"input_ids": [1, 2]}]), error=ConfigError)
