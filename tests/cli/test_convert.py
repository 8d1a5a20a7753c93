"""`peft-mux convert`: files of LLaMA-Factory and Axolotl become files that `peft-mux validate` accepts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from peft_mux.cli.config_file import parse_value
from tests.cli.lab import save_backbone, write_rows
from tests.paths import ROOT
from tests.shell import Shell

CHAT = (
    "{% for message in messages %}{{ message.role }} {{ message.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
TURNS = [{"from": "human", "value": "say one"}, {"from": "gpt", "value": "one"}]
SPOKEN = [{"role": "user", "content": "say one"}, {"role": "assistant", "content": "one"}]
LORA = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
FACTORY = """\
model_name_or_path: backbone
finetuning_type: lora
template: qwen3
lora_target: q_proj,v_proj
lora_dropout: 0.05
dataset_dir: info
cutoff_len: 512
output_dir: saves/first
overwrite_output_dir: true
plot_loss: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 4
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
logging_steps: 5
deepspeed: ds_z3_config.json
use_galore: true
"""
AXOLOTL = """\
base_model: backbone
adapter: lora
lora_r: 8
lora_alpha: 16
lora_target_linear: true
sequence_len: 512
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 2
optimizer: adamw_torch
learning_rate: 2e-4
attn_implementation: flash_attention_2
wandb_project: first
liger_rope: true
"""
DESCRIBED = {
    "questions": {"file_name": "../rows.jsonl", "columns": {"prompt": "q", "response": "a", "history": "before"}},
    "pairs": {"file_name": "../rows.jsonl", "formatting": "sharegpt", "ranking": True},
    "judged": {
        "file_name": "../rows.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "messages", "kto_tag": "good", "images": "pictures"},
        "tags": {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"},
    },
}
OF_FACTORY = {
    "dataset": "rows.jsonl",
    "max_length": 512,
    "learning_rate": 1e-4,
    "num_train_epochs": 3.0,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.1,
    "train_batch_size": 8,
    "peft": {"r": 8, "lora_alpha": 16, "lora_dropout": 0.05, "target_modules": ["q_proj", "v_proj"]},
}
OF_AXOLOTL = {
    "dataset": "rows.jsonl",
    "max_length": 512,
    "learning_rate": 2e-4,
    "num_train_epochs": 2,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.03,
    "train_batch_size": 8,
    "optim": "adamw_torch",
    "peft": LORA,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to a folder with a tiny backbone, whose tokenizer has a chat template, and descriptions of datasets."""
    save_backbone(tmp_path / "backbone", ["say one two user assistant"])
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "backbone")
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(tmp_path / "backbone")
    (tmp_path / "info").mkdir()
    (tmp_path / "info/dataset_info.json").write_text(json.dumps(DESCRIBED), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "row", "task", "named"),
    [
        (
            FACTORY + "stage: sft\ndataset: questions,pairs\nval_size: 0.5\neval_strategy: steps\neval_steps: 1\n",
            {"q": "say one", "a": "one", "before": [["say two", "two"]]},
            OF_FACTORY
            | {"row_format": {"format": "alpaca_chat", "instruction": "q", "output": "a", "history": "before"}}
            | {"completion_only_loss": False, "assistant_only_loss": True}
            | {"val_size": 0.5},
            ["dataset.1 ", "template: the tokenizer's chat", "plot_loss", "deepspeed: adapters of many", "use_galore"],
        ),
        (
            FACTORY + "stage: dpo\ndataset: pairs\npref_loss: hinge\npref_beta: 0.2\npref_ftx: 1.0\n",
            {"conversations": TURNS[:1], "chosen": TURNS[1], "rejected": {"from": "gpt", "value": "two"}},
            OF_FACTORY
            | {"row_format": "sharegpt", "objective": "dpo", "loss_type": "hinge", "objective_args": {"beta": 0.2}},
            ["pref_ftx: set loss_type: [sigmoid, sft]", "overwrite_output_dir: resume with"],
        ),
        (
            FACTORY + "stage: kto\ndataset: judged\nkto_chosen_weight: 0.5\nsimpo_gamma: 1.0\neval_steps: 5\n",
            {"messages": SPOKEN, "good": True},
            OF_FACTORY
            | {"row_format": {"format": "sharegpt", "conversations": "messages", "kto_tag": "good"}}
            | {"objective": "kto", "objective_args": {"desirable_weight": 0.5}},
            [
                "simpo_gamma: kto has no such",
                "judged, column images: it is not read",
                "eval_steps: there are no held-out",
            ],
        ),
        (
            AXOLOTL + "datasets: [{path: rows.jsonl, type: chat_template, train_on_eos: all}]\ntrain_on_inputs: false\n"
            "val_set_size: 2\nevals_per_epoch: 4\nsample_packing: true\n",
            {"messages": SPOKEN},
            OF_AXOLOTL
            | {"row_format": {"format": "sharegpt", "conversations": "messages"}, "assistant_only_loss": True}
            | {"val_size": 2, "packing": True},
            [
                "datasets.0.train_on_eos",
                "attn_implementation: attention",
                "wandb_project: set",
                "liger_rope: it has no",
            ],
        ),
        (
            AXOLOTL + "rl: ipo\nrl_beta: 0.3\ndatasets:\n- path: rows.jsonl\n  type: chat_template.default\n"
            "  field_messages: conversations\n  message_property_mappings: {role: from, content: value}\n"
            "- {path: org/other, type: chatml.intel}\n",
            {"conversations": TURNS[:1], "chosen": TURNS[1], "rejected": {"from": "gpt", "value": "two"}},
            OF_AXOLOTL
            | {"row_format": "sharegpt", "objective": "dpo", "loss_type": "ipo", "objective_args": {"beta": 0.3}},
            ["datasets.1 org/other: a task has rows of one format"],
        ),
        (
            AXOLOTL + "rl: kto\nkto_undesirable_weight: 0.2\ndatasets: [{path: rows.jsonl, type: chatml.intel}]\n",
            {"question": "say one", "completion": "one", "label": False},
            OF_AXOLOTL
            | {"row_format": {"format": "alpaca_chat", "instruction": "question", "output": "completion"}}
            | {"objective": "kto", "objective_args": {"undesirable_weight": 0.2}},
            ["datasets.0.type chatml.intel: the tokenizer's chat template is used"],
        ),
        (
            AXOLOTL + "datasets:\n- &rows {path: rows.jsonl, type: completion, field: body}\n- *rows\n",
            {"body": "say one"},
            OF_AXOLOTL | {"dataset": [{"path": "rows.jsonl"}, {"path": "rows.jsonl"}], "row_format": {"text": "body"}},
            ["number of processes: train_batch_size"],
        ),
    ],
    ids=["factory-sft", "factory-dpo", "factory-kto", "axolotl-sft", "axolotl-dpo", "axolotl-kto", "axolotl-text"],
)
def test_a_file_becomes_one_that_is_valid_and_names_what_is_left_out(
    text: str, row: dict[str, Any], task: dict[str, Any], named: list[str], folder: Path, shell: Shell
) -> None:
    rows = [json.loads(json.dumps(row).replace("say", "say " * count)) for count in range(1, 5)]
    write_rows(folder / "rows.jsonl", rows)
    Path("first.yaml").write_text(text, encoding="utf-8")
    out, err = shell.streams("convert", "first.yaml", "-o", "new.yaml")
    assert "written: new.yaml" in out
    written = Path("new.yaml").read_text(encoding="utf-8")
    config = yaml.safe_load(written)
    assert config["tasks"] == {"first": task}
    assert config["model"] == "backbone"
    for name in named:
        assert name in written
        assert name in " ".join(err.split())
    shell("validate", "new.yaml", "--set", "run.use_cpu=true")
    assert "got new.yaml, which exists" in shell.refused("convert", "first.yaml", "-o", "new.yaml")


def test_a_quantized_backbone_and_intervals_of_epochs_are_taken_over(folder: Path, shell: Shell) -> None:
    text = AXOLOTL.replace("adapter: lora", "adapter: qlora\nload_in_4bit: true\nbf16: auto\nsaves_per_epoch: 1")
    Path("a b.yml").write_text(text + "datasets: [{path: org/rows, type: alpaca, name: en}]\n", encoding="utf-8")
    Path("deep").mkdir()
    shell("convert", "a b.yml", "-o", "deep/new.yaml")
    config = yaml.safe_load(Path("deep/new.yaml").read_text(encoding="utf-8"))
    assert config["model"] == "../backbone", "paths start at the new file"
    assert config["model_init_kwargs"]["quantization_config"]["load_in_4bit"] is True
    assert config["run"] == {"overlong_policy": "drop", "bf16": True, "save_strategy": "steps", "save_steps": 0.5}
    assert config["tasks"]["a-b"] == OF_AXOLOTL | {
        "dataset": "org/rows",
        "dataset_config": "en",
        "row_format": "alpaca",
    }


def test_the_files_of_the_page_become_what_it_shows(folder: Path, shell: Shell) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/coming_from.md").read_text(encoding="utf-8"), re.DOTALL)
    Path("data").mkdir()
    described = {"sql": {"file_name": "sql.json", "formatting": "sharegpt"}}
    assert json.dumps(described) in blocks[0]
    Path("data/dataset_info.json").write_text(json.dumps(described), encoding="utf-8")
    for text, shown in zip(blocks[::2], blocks[1::2], strict=True):
        Path("first.yaml").write_text(text, encoding="utf-8")
        shell("convert", "first.yaml", "-o", "new.yaml")
        written = yaml.safe_load(Path("new.yaml").read_text(encoding="utf-8"))
        assert written == parse_value(shown, "page")
        Path("new.yaml").unlink()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model_name_or_path: [", "is not YAML"),
        ("stages: sft\n", "must have the key model_name_or_path (LLaMA-Factory) or base_model (Axolotl), got the keys"),
        (FACTORY + "stage: ppo\n", "first.yaml:20 stage must be one of sft, dpo, kto, got 'ppo'"),
        (FACTORY + "stage: pt\ndataset: questions\n", "stage must be one of sft, dpo, kto, got 'pt'"),
        (FACTORY.replace("lora\n", "full\n", 1), "finetuning_type must be one of lora, got 'full'"),
        (FACTORY, "dataset must be a name of info/dataset_info.json"),
        (FACTORY + "lora_rank: {a: 1}\n", "first.yaml:20 lora_rank must be an integer of at least 1, got {'a': 1}"),
        (FACTORY.replace("saves/first", "5"), "output_dir must be a string, got 5"),
        (FACTORY + "val_size: some\n", "val_size must be a number of at least 0, got 'some'"),
        (FACTORY + "dataset: question\n", "got 'question'. Did you mean \"questions\"?"),
        (FACTORY.replace("info\n", "other\n") + "dataset: a\n", "dataset_dir must be a folder with a JSON file"),
        (AXOLOTL.replace("lora\n", "\n", 1) + "rl: grpo\n", "adapter must be one of lora, qlora, got None"),
        (AXOLOTL, "datasets.0 must be a dataset with path and type, got None"),
        (AXOLOTL + "datasets: [{path: a, type: input_output}]\n", "datasets.0.type must be one of alpaca, completion"),
        (
            AXOLOTL + "datasets: [{path: a, type: chat_template, message_property_mappings: {role: who}}]\n",
            "datasets.0 role of messages must be one of from, role, got 'who'",
        ),
    ],
)
def test_a_file_that_cannot_be_converted_is_refused_with_the_reason(
    text: str, said: str, folder: Path, shell: Shell
) -> None:
    Path("first.yaml").write_text(text, encoding="utf-8")
    assert said in shell.refused("convert", "first.yaml")
    assert not Path("tasks.yaml").exists()
