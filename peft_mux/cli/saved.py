"""`peft-mux generate | eval RUN`: complete prompts with the saved adapters of a run, and evaluate these adapters.

Both load the backbone in this process alone, whatever the layout of the run was.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.cli.commands import make_trainer
from peft_mux.cli.config_file import RECORD_NAME, RunConfig, parse_value, read_config
from peft_mux.cli.export import adapters_of
from peft_mux.data.formats import DataFormat
from peft_mux.errors import ConfigError, closest, printable
from peft_mux.generation.decoding import generate as complete
from peft_mux.generation.requests_and_completions import GenerationRequest
from peft_mux.log.lines import window_width, wrapped
from peft_mux.log.metrics_file import METRICS_NAME, read_metrics
from peft_mux.task import Task

_IN_ONE_PROCESS = {
    **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size"), 1),
    **dict.fromkeys(("shard_backbone", "shard_optimizer", "redeploy", "push_to_hub"), False),
    **dict.fromkeys(("replicas", "upload_to"), None),
    "report_to": "none",
}
"""Arguments of a run in which one process differs from those that trained."""


def generate(arguments: argparse.Namespace) -> int:
    """Print the completions of prompts by the saved adapters of a run; return the exit status.

    Raises:
        ConfigError: for a run without adapters, unknown tasks, a missing chat template, or options out of range.
    """
    root = Path(arguments.run)
    adapters = _chosen(root, arguments.tasks)
    record, path = {}, root / RECORD_NAME
    if path.is_file():
        record = parse_value(path.read_text(encoding="utf-8"), str(path))
    model = record.get("model") or next(iter(adapters.values())).get("base_model_name_or_path")
    if not model:
        raise ConfigError(f"generate needs the name of the backbone, which {path} or adapter_config.json has.")
    rows = [{"input_ids": [0, 0]}]  # a trainer needs some
    tasks = [Task(name=name, init_adapter=root / name, train_dataset=rows) for name in adapters]  # type: ignore[call-arg]
    numerics = {key: value for key, value in record.get("run", {}).items() if key in ("use_cpu", "bf16", "tf32")}
    args = MultiTaskTrainingArguments(output_dir=str(root), report_to="none", **numerics)
    trainer = make_trainer(
        RunConfig(model, record.get("tokenizer"), args, tasks, record.get("model_init_kwargs", {}), str(path))
    )
    trainer.load_adapters(root)
    metrics = read_metrics(root / METRICS_NAME) if (root / METRICS_NAME).is_file() else []
    chats = {line["task"] for line in metrics if line.get("data_format") == DataFormat.MESSAGES}
    requests = []
    for name in adapters:
        is_chat = name in chats if arguments.chat is None else arguments.chat
        tokenizer: Any = trainer.processing_class
        if (root / name / "tokenizer_config.json").is_file():  # of a task with a chat template of its own
            tokenizer = AutoTokenizer.from_pretrained(root / name, trust_remote_code=False)
        if is_chat and not getattr(tokenizer, "chat_template", None):
            raise ConfigError(f"--chat needs a chat template, which the tokenizer of {name} lacks. Add --no-chat.")
        for text in arguments.prompts:
            prompt: Any = text
            if is_chat:
                messages = [{"role": "user", "content": text}]
                prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            requests.append(GenerationRequest(task=name, prompt=prompt))
    sampling = {"do_sample": True, "temperature": arguments.temperature} if arguments.temperature else {}
    completions = complete(
        trainer.model,
        requests,
        processing_class=trainer.processing_class,
        max_new_tokens=arguments.max_new_tokens,
        **sampling,
    )
    texts = arguments.prompts * len(adapters)
    if arguments.json:
        rows = [
            {"task": each.task, "prompt": text, "completion": each.text, "finish_reason": each.finish_reason}
            for each, text in zip(completions, texts, strict=True)
        ]
        print(json.dumps(rows, indent=1))
        return 0
    if len(completions) == 1:
        print(printable(str(completions[0].text)))
        return 0
    width = max(map(len, adapters))
    for prompt in arguments.prompts:
        print(wrapped(printable(prompt), window_width()))
        for each, text in zip(completions, texts, strict=True):
            if text == prompt:
                print(wrapped(f"  {each.task:<{width}}  {printable(str(each.text))}", window_width()))
    return 0


def evaluate(arguments: argparse.Namespace) -> int:
    """Print the metrics of saved adapters on held-out rows and in lm-evaluation-harness; return the exit status.

    Raises:
        ConfigError: for a run without adapters or held-out rows, or unknown tasks.
    """
    root = Path(arguments.run)
    adapters, path = _chosen(root, arguments.tasks), root / RECORD_NAME
    if not path.is_file():
        raise ConfigError(f"eval needs {path}, which peft-mux train writes. For a run of a script: trainer.evaluate().")
    changes = {f"run.{key}": value for key, value in _IN_ONE_PROCESS.items()}
    if arguments.data is not None:
        given = {"eval_dataset": str(Path(arguments.data).absolute()), "eval_split": None, "val_size": None}
        changes |= {f"tasks.{name}.{key}": value for name in adapters for key, value in given.items()}
    config = read_config(path, [f"{key}={json.dumps(value)}" for key, value in changes.items()])
    tasks = [task for task in config.tasks if task.name in adapters and task.eval_dataset is not None]
    lacking = [name for name in arguments.tasks if name not in ("all", *(task.name for task in tasks))]
    if lacking or not (tasks or arguments.harness):
        which = ", ".join(lacking) or "no task"
        raise ConfigError(f"eval needs held-out rows, which {which} has in {path}. Name some with --data.")
    metrics: dict[str, dict[str, float]] = {name: {} for name in adapters}
    if tasks:
        trainer = make_trainer(replace(config, tasks=tasks))
        trainer.load_adapters(root)
        for key, value in trainer.evaluate().items():
            name, _, metric = key.partition("/")
            metrics[name][metric] = value
    if arguments.harness:
        for name in adapters:
            metrics[name] |= _harness(config.model, root / name, arguments.harness)
    metrics = {name: values for name, values in metrics.items() if values}
    if arguments.json:
        print(json.dumps(metrics, indent=1))
        return 0
    columns = list(dict.fromkeys(metric for values in metrics.values() for metric in values))
    table = [["task", *columns]]
    table += [[name, *(f"{row[key]:.4f}" if key in row else "-" for key in columns)] for name, row in metrics.items()]
    widths = [max(map(len, cells)) for cells in zip(*table, strict=True)]
    for first, *cells in table:
        print("  ".join([first.ljust(widths[0]), *(f"{c:>{w}}" for c, w in zip(cells, widths[1:], strict=True))]))
    return 0


def _harness(model: str, adapter: Path, benchmarks: str) -> dict[str, float]:
    """Return the metrics of an adapter on some benchmarks of lm-evaluation-harness, as `benchmark/metric`."""
    try:
        import lm_eval  # type: ignore[import-not-found]
    except ImportError as error:
        raise ConfigError("--harness needs lm-evaluation-harness. Install it: pip install lm-eval") from error
    options = {"pretrained": model, "peft": str(adapter)}
    results = lm_eval.simple_evaluate(model="hf", model_args=options, tasks=benchmarks.split(","))["results"]
    return {
        f"{benchmark}/{metric}": value
        for benchmark, metrics in results.items()
        for metric, value in metrics.items()
        if isinstance(value, float)
    }


def _chosen(root: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the configurations of the saved adapters of some tasks, by default all."""
    adapters = adapters_of(root)
    for name in names:
        if name not in (*adapters, "all"):
            hint = closest(name, list(adapters))
            raise ConfigError(f"--task must be one of {', '.join(adapters)}, got {name!r}. {hint}".rstrip())
    return {name: adapter for name, adapter in adapters.items() if not names or name in names or "all" in names}
