"""`peft-mux generate` and `eval`: what the saved adapters of a run complete, and how they do on held-out rows."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from peft_mux.cli.main import main
from tests.cli.lab import write_rows
from tests.records import run_records
from tests.shell import Shell

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
FILE = f"""\
model: backbone
output_dir: saved
run: {{use_cpu: true, report_to: none, max_steps: 3, logging_steps: 2, eval_strategy: steps, eval_steps: 2}}
defaults: {{dataset: rows.jsonl, learning_rate: 1e-2, peft: {{r: 4, target_modules: all-linear}}}}
tasks:
  sql: {{val_size: 2, early_stopping: {{patience: 9}}}}
  dpo: {{dataset: pairs.jsonl, eval_dataset: pairs.jsonl, objective: dpo, init_adapter: start}}
  chat: {{dataset: chat.jsonl, chat_template: "{TEMPLATE}"}}
"""


@pytest.fixture(scope="module")
def run(made: Path) -> Path:
    """Train a task with rows held out, one with a reference, and one of messages."""
    write_rows(made / "pairs.jsonl", [{"prompt": "say", "chosen": " one", "rejected": " two"}] * 3)
    turns = [{"role": "user", "content": "say two"}, {"role": "assistant", "content": " two"}]
    write_rows(made / "chat.jsonl", [{"messages": turns}] * 3)
    first = "model: backbone\noutput_dir: first\nrun: {use_cpu: true, report_to: none, max_steps: 2}\n"
    first += "tasks:\n  start: {dataset: rows.jsonl, learning_rate: 1e-2, peft: {r: 4, target_modules: all-linear}}\n"
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(datasets.config, "HF_DATASETS_CACHE", str(made / "cache"))
        for name, text in (("first", first), ("tasks", FILE.replace("start}", "first/start}"))):
            (made / f"{name}.yaml").write_text(text, encoding="utf-8")
            assert main(["train", str(made / f"{name}.yaml")]) == 0
    return made / "saved"


@pytest.mark.slow
def test_saved_adapters_have_the_metrics_of_the_last_evaluation_of_the_training(run: Path, shell: Shell) -> None:
    logged = {record["task"]: record for record in run_records(run, "eval")}
    found = shell.json("eval", run)
    assert found.keys() == logged.keys() == {"sql", "dpo"}
    for name, own in found.items():
        assert own == {key: pytest.approx(logged[name][key], rel=1e-6) for key in own}
        assert {key for key in logged[name] if key.startswith("eval_")} - {*own} <= {
            "eval_runtime",
            "eval_samples_per_second",
            "eval_steps_per_second",
        }
    assert shell("eval", run, "--task", "sql").split()[:4] == ["task", *list(found["sql"])[:2], "sql"]


def test_rows_of_another_file_and_benchmarks_of_a_harness_are_evaluated(
    run: Path, made: Path, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def simple_evaluate(**options: Any) -> Any:
        asked.append(options)
        return {"results": {"arc_easy": {"alias": "arc_easy", "acc,none": 0.5}}}

    words = ["eval", run, "--task", "chat", "--data", made / "chat.jsonl", "--harness", "arc_easy"]
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert "pip install lm-eval" in shell.refused(*words)
    monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace(simple_evaluate=simple_evaluate))
    found = shell.json(*words)
    assert (found.keys(), found["chat"]["arc_easy/acc,none"]) == ({"chat"}, 0.5)
    assert found["chat"]["eval_loss"] > 0
    options = {"pretrained": str(made / "backbone"), "peft": str(run / "chat")}
    assert asked == [{"model": "hf", "model_args": options, "tasks": ["arc_easy"]}]


def test_completions_are_those_of_plain_peft_and_tasks_with_messages_get_a_chat(
    run: Path, made: Path, tmp_path: Path, shell: Shell
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made / "backbone")
    wanted = {}
    for name in ("sql", "chat"):
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(made / "backbone"), run / name)
        ids = tokenizer("say one", return_tensors="pt").input_ids
        made_ids = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
        wanted[name] = tokenizer.decode(made_ids[0, ids.shape[1] :], skip_special_tokens=True)
    words = ["generate", run, "--max-new-tokens", "4", "say one"]
    rows = shell.json(*words, "--task", "sql", "--task", "chat", "--no-chat")
    assert {row["task"]: row["completion"] for row in rows} == wanted
    assert shell(*words, "--task", "sql").strip() == wanted["sql"].strip()
    lines = shell(*words, "say two", "--task", "all", "--temperature", "0.7").splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == ["chat", "dpo", "sql"] * 2
    # As of a script, without a file of the tasks.
    shutil.copytree(run / "sql", tmp_path / "script" / "sql")
    assert shell("generate", tmp_path / "script", "say one", "--max-new-tokens", "4").strip() == wanted["sql"].strip()
    assert "which peft-mux train writes" in shell.refused("eval", tmp_path / "script")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("generate", "RUN", "x", "--task", "sq"),
            "--task must be one of chat, dpo, sql, got 'sq'. Did you mean \"sql\"",
        ),
        (("eval", "RUN", "--task", "sq"), "--task must be one of chat, dpo, sql, got 'sq'. Did you mean \"sql\""),
        (("generate", "RUN", "x", "--task", "sql", "--chat"), "which the tokenizer of sql lacks"),
        (("generate", "RUN", "x", "--temperature", "-1"), "temperature must be a finite number above 0, got -1"),
        (("generate", "RUN", "x", "--max-new-tokens", "0"), "max_new_tokens must be an integer"),
        (("generate", "NOWHERE", "x"), "which holds no adapters"),
        (("eval", "NOWHERE"), "which holds no adapters"),
        (("eval", "RUN", "--task", "chat"), "eval needs held-out rows, which chat has in"),
        (("eval", "RUN", "--data", "absent.jsonl"), "absent.jsonl', which does not exist"),
    ],
)
def test_what_cannot_be_generated_or_evaluated_is_refused(
    words: tuple[str, ...], said: str, run: Path, tmp_path: Path, shell: Shell
) -> None:
    folders = {"RUN": str(run), "NOWHERE": str(tmp_path)}
    assert said in shell.refused(*(folders.get(word, word) for word in words))
