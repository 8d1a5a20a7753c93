"""Small trainings and every bit of what they leave; `compare_runs.py` runs this file in a process for each checkout.

It uses public names of `peft_mux` alone, so that the same file runs on the checkout from before a refactoring.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
from peft import LoraConfig
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

import peft_mux
from peft_mux import EarlyStopping, MultiTaskTrainer, MultiTaskTrainingArguments, Task

VOCABULARY = 97
MEASURED = re.compile(r"time|second|peak")
"""Parts of the names of numbers that differ from run to run."""
OF_CLOCKS = ("forecast", "times")
"""Records that contain only times, and are written when times require it."""
WORDS = "<unk> <eos> assistant user : the cat sat on a mat dog ran home yes no".split()
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}assistant : {% generation %}{{ message.content }}"
    "{{ eos_token }}{% endgeneration %}{% else %}{{ message.role }} : {{ message.content }} {% endif %}{% endfor %}"
)

# ------------------------------------------------------------------- backbones

WIDE = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4}
SHAPE = {"num_hidden_layers": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": 0, **WIDE}


def llama(kind: Any = tf.LlamaForCausalLM) -> Any:
    """Return a small Llama, the same at every call."""
    torch.manual_seed(7)
    return kind(tf.LlamaConfig(**SHAPE, initializer_range=0.1))


def gpt2() -> Any:
    """Return a small GPT-2 with dropout of its own."""
    torch.manual_seed(7)
    size = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": VOCABULARY}
    return tf.GPT2LMHeadModel(tf.GPT2Config(**size, attn_pdrop=0.0, embd_pdrop=0.1, resid_pdrop=0.1))


def words_tokenizer() -> Any:
    """Return a tokenizer of whole words."""
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="<eos>")


# ----------------------------------------------------------------------- tasks


def rows(seed: int, count: int, low: int, high: int, classes: int = 0) -> list[dict[str, Any]]:
    """Return rows of random tokens, with labels where there are classes."""
    rng = np.random.default_rng(seed)
    found = [{"input_ids": rng.integers(1, VOCABULARY, rng.integers(low, high + 1)).tolist()} for _ in range(count)]
    return [{**row, "label": number % classes} for number, row in enumerate(found)] if classes else found


def task(name: str, seed: int, peft: dict[str, Any] | None = None, **settings: Any) -> Task:
    """Return a small task, with other settings where they are given."""
    config = LoraConfig(**{"r": 4, "target_modules": "all-linear", **(peft or {})})
    usual = {"train_batch_size": 4, "learning_rate": 3e-3, "max_steps": 6, "seed": seed}
    data = {"train_dataset": rows(seed, 10, 5 + seed, 12 + 2 * seed), **settings}
    return Task(name=name, peft_config=config, **{**usual, **data})


def nll(prediction: tf.EvalPrediction) -> dict[str, float]:
    """Return the mean loss of whole logits."""
    logits, labels = (torch.from_numpy(one) for one in (prediction.predictions, prediction.label_ids))
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    return {"nll": loss.item()}


def accuracy(prediction: tf.EvalPrediction) -> dict[str, float]:
    """Return the share of rows that are classified rightly, and the mean of the logits."""
    right = prediction.predictions.argmax(-1) == prediction.label_ids
    return {"accuracy": float(right.mean()), "logit": float(prediction.predictions.mean())}


def declining() -> Callable[[Any], dict[str, float]]:
    """Return a metric that is worse at every call."""
    scores = iter(range(0, -100, -1))
    return lambda prediction: {"score": float(next(scores))}


def mixed(**changed: Any) -> list[Task]:
    """Return tasks that differ in all that may differ, and end at different steps by default."""
    held_out = {"eval_dataset": rows(90, 5, 5, 9), "eval_steps": 2}
    stops = {"compute_metrics": declining(), "early_stopping": EarlyStopping(metric="score", patience=2)}
    narrow = {"r": 8, "lora_alpha": 32, "lora_dropout": 0.2, "target_modules": ["q_proj", "v_proj"]}
    stable = {"r": 16, "use_rslora": True, "target_modules": ["gate_proj", "down_proj"]}
    own: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "linear": ({}, {"lr_scheduler_type": "linear", "warmup_steps": 2, "max_steps": 8, **held_out}),
        "cosine": (narrow, {"lr_scheduler_type": "cosine", "max_grad_norm": 0.05}),
        "stable": (stable, {"optim": "sgd", "learning_rate": 0.1, "lr_scheduler_type": "constant", "max_steps": 5}),
        "factored": ({"r": 3}, {"optim": "adafactor", "train_batch_size": 1, "compute_metrics": nll, **held_out}),
        "epochs": ({"r": 2}, {"weight_decay": 0.1, "max_steps": None, "num_train_epochs": 1.5, "shuffle": False}),
        "stops": ({}, {**held_out, **stops, "eval_steps": 1}),
    }
    return [
        task(name, seed, peft, **{**settings, **changed}) for seed, (name, (peft, settings)) in enumerate(own.items())
    ]


def classifiers() -> list[Task]:
    """Return classifiers with unequal numbers of labels."""
    return [
        task(
            f"classes{count}",
            count,
            {"task_type": "SEQ_CLS", "r": count, "lora_dropout": 0.1},
            train_dataset=rows(count, 12, 4, 12, count),
            eval_dataset=rows(count + 50, 6, 4, 9, count),
            eval_steps=3,
            num_labels=count,
            compute_metrics=accuracy,
        )
        for count in (2, 3, 5)
    ]


def texts() -> list[Task]:
    """Return tasks whose rows are texts, prompts with completions, and messages."""
    said = [{"role": "user", "content": "the cat sat"}, {"role": "assistant", "content": "yes on a mat"}]
    kinds: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
        "text": ([{"text": "the cat sat on a mat"}, {"text": "a dog ran home"}], {}),
        "prompts": (
            [{"prompt": "the cat sat on", "completion": " a mat"}, {"prompt": "a dog", "completion": "ran"}],
            {},
        ),
        "messages": ([{"messages": said}, {"messages": said * 2}], {"assistant_only_loss": True, "max_length": 16}),
    }
    return [
        task(name, seed, train_dataset=data * 4, chat_template=TEMPLATE if name == "messages" else None, **settings)
        for seed, (name, (data, settings)) in enumerate(kinds.items())
    ]


# --------------------------------------------------------------------- running


class Acts(tf.TrainerCallback):
    """Acts on the trainer after some steps of the run."""

    def __init__(self, acts: dict[int, Callable[[MultiTaskTrainer], Any]]) -> None:
        """Remember what to do after which step."""
        self.acts = acts
        self.trainer: MultiTaskTrainer | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Act."""
        self.acts.get(state.global_step, lambda trainer: None)(self.trainer)


def make(folder: Path, tasks: Sequence[Task], model: Any = None, tokenizer: Any = None, **settings: Any) -> Any:
    """Return a quiet trainer that logs every step and saves every third one."""
    usual = {"logging_strategy": "steps", "logging_steps": 1, "save_strategy": "steps", "save_steps": 3}
    quiet = {"use_cpu": True, "disable_tqdm": True, "report_to": "none", "ddp_timeout": 60}
    args = MultiTaskTrainingArguments(
        output_dir=str(folder), **{"max_tokens_per_micro_batch": 64, **usual, **quiet, **settings}
    )
    return MultiTaskTrainer(model or llama(), args, list(tasks), processing_class=tokenizer)


def train(
    folder: Path, tasks: Sequence[Task], acts: Any = None, *, resume: bool = False, **given: Any
) -> dict[str, Any]:
    """Train, and return every bit of the results."""
    trainer = make(folder, tasks, **given)
    callback = Acts(acts or {})
    callback.trainer = trainer
    trainer.add_callback(callback)
    plan = shown_plan(trainer.plan())
    output = trainer.train(resume_from_checkpoint=resume or None)
    found = {
        "statuses": {name: status.value for name, status in trainer.task_statuses.items()},
        "logs": {name: state.log_history for name, state in trainer.task_states.items()},
        "output": [output.global_step, output.training_loss, unmeasured(output.metrics)],
    }
    if trainer.is_world_process_zero():
        found |= {"plan": plan, **shown_folder(folder)}
    return found


def shown_plan(plan: Any) -> dict[str, Any]:
    """Return a plan as text and numbers, without measured values."""
    names = [task for htask in plan.htasks for task in htask.tasks]
    return {
        "summary": plan.summary().splitlines(),
        "explained": list(map(plan.explain, names)),
        "plan": json.loads(plan.to_json()),
    }


def shown_folder(folder: Path) -> dict[str, Any]:
    """Return what a run has written: digests of tensors, what was logged, and which settings were stored."""
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*.*")) if path.is_file()}
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return {
        "names": list(files),
        "tensors": {name: digest(load_file(path)) for name, path in files.items() if path.suffix == ".safetensors"},
        "records": [unmeasured(record) for record in records if record.get("event") not in OF_CLOCKS],
        "config": sorted(keys(json.loads((folder / "config.json").read_text(encoding="utf-8")))),
    }


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """Return the SHA-256 over names, shapes, types and bytes."""
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        sha.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def keys(value: Any, prefix: str = "") -> list[str]:
    """Return the dotted names of all that nested dicts hold."""
    inner = value.items() if isinstance(value, dict) else ()
    return [name for key, item in inner for name in (prefix + key, *keys(item, f"{prefix}{key}."))]


def unmeasured(numbers: dict[str, Any]) -> dict[str, Any]:
    """Return what is the same in every run."""
    return {name: number for name, number in numbers.items() if not MEASURED.search(name)}


def exact(value: Any) -> Any:
    """Return a value as JSON with every bit of its floats."""
    if isinstance(value, dict):
        return {str(key): exact(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [exact(item) for item in value]
    return value.hex() if isinstance(value, float) else value


# ----------------------------------------------------------------------- cases


def stop(trainer: MultiTaskTrainer) -> None:
    """End the run with a state to resume from."""
    trainer.control.should_training_stop = True


def come_and_go(folder: Path) -> dict[str, Any]:
    """Let a task come, another go, and a third one pause."""
    late = task("late", 9, max_steps=4)
    acts = {
        2: lambda trainer: (trainer.register_tasks([late]), trainer.pause_task("cosine")),
        3: lambda trainer: trainer.remove_task("linear"),
        5: lambda trainer: trainer.resume_task("cosine"),
    }
    return train(folder, mixed(), acts)


def poisoned(folder: Path) -> dict[str, Any]:
    """Train together with a task whose second loss is not finite."""
    nan = task("nan", 8, {"r": 8}, optim="sgd", learning_rate=1e30, max_grad_norm=0.0, lr_scheduler_type="constant")
    return train(folder, [nan, *mixed()])


def elsewhere(folder: Path) -> dict[str, Any]:
    """Plan for machines that are not there, without training."""
    trainer = make(folder, mixed())
    found = {devices: shown_plan(trainer.plan(devices)) for devices in ("2xA100-80GB", "1xH100-80GB")}
    deployment = str(trainer.plan_deployment("4xA100-40GB"))
    without_seconds = re.sub(r"(planned|plans) in [0-9.]+ s", r"\1", deployment)
    return {**found, "deployment": without_seconds.splitlines()}


CHAINS = {"split_long_sequences": True, "max_tokens_per_micro_batch": 16, "chunk_size": 4}
CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "planner mux": lambda folder: train(folder, mixed()),
    "planner together": lambda folder: train(folder, mixed(), planner="together"),
    "planner interleaved": lambda folder: train(folder, mixed(), planner="interleaved"),
    "planner sequential": lambda folder: train(folder, mixed(), planner="sequential"),
    "classifiers": lambda folder: train(folder, classifiers(), model=llama(tf.LlamaForSequenceClassification)),
    "texts": lambda folder: train(folder, texts(), tokenizer=words_tokenizer()),
    "long rows in chunks": lambda folder: train(folder, mixed(), **CHAINS),
    "recomputed": lambda folder: train(folder, mixed(), gradient_checkpointing=True),
    "bfloat16": lambda folder: train(folder, mixed(), bf16=True),
    "GPT-2": lambda folder: train(folder, [task("one", 1), task("two", 2, {"lora_dropout": 0.1})], model=gpt2()),
    "come and go": come_and_go,
    "quarantine": poisoned,
    "plans for elsewhere": elsewhere,
    "half": lambda folder: train(folder, mixed(), {4: stop}),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {},
    "pp2": {"pipeline_parallel_size": 2},
    "tp2": {"tensor_parallel_size": 2},
    "tp2 in turns": {"tensor_parallel_size": 2, "interleaved_passes": 2},
    "fsdp2": {"shard_backbone": True},
}


def laid_out(folder: Path, arguments: dict[str, Any]) -> dict[str, Any]:
    """Train over several processes the tasks whose optimizers treat every element equally, as all layouts require."""
    return train(folder, [one for one in mixed() if one.optim != "adafactor"], **arguments)


def resumed(folder: Path, half: Path) -> dict[str, Any]:
    """Resume a copy of a run that another checkout has stopped."""
    shutil.copytree(half, folder)
    return train(folder, mixed(), resume=True)


def shown(run: Callable[[Path], dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Return what a case shows, or that it failed."""
    try:
        return exact(run(folder))
    except Exception as error:
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {error}"}


def main() -> None:
    """Run the cases, or under a launcher the layouts, and write what they show; each process writes its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--half", type=Path)
    given = parser.parse_args()
    home = Path(str(peft_mux.__file__)).resolve().parents[1]
    assert home == Path(os.environ["PYTHONPATH"]).resolve(), f"peft_mux comes from {home}"
    torch.set_num_threads(1)
    rank, cases = os.environ.get("RANK"), dict(CASES)
    if rank is not None:
        cases = {f"{name}, rank {rank}": partial(laid_out, arguments=one) for name, one in LAYOUTS.items()}
    elif given.half is not None:
        cases["resumed"] = partial(resumed, half=given.half)
    found = {name: shown(run, given.folder / name.partition(",")[0]) for name, run in cases.items()}
    (given.folder / f"shown{'' if rank is None else f'-{rank}'}.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
