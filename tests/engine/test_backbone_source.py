"""A model's own code: it runs only with `trust_remote_code=True`, and no question is asked on standard input."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from peft_mux import ConfigError, MultiTaskTrainer, MultiTaskTrainingArguments, Task
from peft_mux.cli.main import main
from tests.invariants.mux_lab import rows
from tests.modeling.test_architectures import llava
from tests.paths import ROOT

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Path({marker!r}).write_text("it ran")

class OwnConfig(LlamaConfig):
    model_type = "own_model"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a model that brings its own code, which leaves the file `ran` when it runs."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked on standard input"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    own = tmp_path / "model"
    own.mkdir()
    (own / "code.py").write_text(CODE.format(marker=str(tmp_path / "ran")))
    settings = {
        "model_type": "own_model",
        "auto_map": {"AutoConfig": "code.OwnConfig", "AutoModelForCausalLM": "code.OwnForCausalLM"},
        **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    }
    (own / "config.json").write_text(json.dumps(settings))
    (own / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "code.OwnTokenizer"]}})
    )
    return own


def trainer_of(model: Any, tmp_path: Path, **options: Any) -> MultiTaskTrainer:
    args = MultiTaskTrainingArguments(output_dir=str(tmp_path / "run"), use_cpu=True)
    task = Task(name="own", peft_config=LoraConfig(r=2, target_modules=["q_proj"]), train_dataset=rows(0, 4, 5, 5))
    return MultiTaskTrainer(model, args, [task], **options)


def test_a_models_own_code_is_refused_with_the_argument_that_allows_it(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r'model ".*" cannot be read: The repository.*model_init_kwargs=\{"trust_remote_code": True\}'
    ):
        trainer_of(str(folder), tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_models_own_code_runs_where_it_is_trusted(folder: Path, tmp_path: Path) -> None:
    trainer = trainer_of(str(folder), tmp_path, model_init_kwargs={"trust_remote_code": True})
    assert type(trainer.model.backbone).__name__ == "OwnForCausalLM"
    assert (tmp_path / "ran").exists()


def test_the_code_of_a_tokenizer_does_not_run_either(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a b"}\n' * 3)
    (tmp_path / "tasks.yaml").write_text(
        f"model: {folder}\ntokenizer: {folder}\noutput_dir: {tmp_path / 'run'}\nrun: {{use_cpu: true}}\n"
        "tasks: {own: {dataset: rows.jsonl, max_steps: 1}}\n"
    )
    assert main(["plan", str(tmp_path / "tasks.yaml")]) == 2
    stderr = capsys.readouterr().err
    assert 'error: tokenizer "' in stderr
    assert "trust_remote_code" in stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("options", [{"trust_remote_code": "yes"}, 5, {1: 2}])
def test_options_of_a_wrong_type_are_refused(folder: Path, tmp_path: Path, options: Any) -> None:
    with pytest.raises(ConfigError, match=r"model_init_kwargs(\.trust_remote_code)? must be "):
        trainer_of(str(folder), tmp_path, model_init_kwargs=options)
    assert not (tmp_path / "ran").exists()


def test_an_option_that_no_model_takes_is_a_config_error(tmp_path: Path, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match="model"):
        trainer_of(str(folder), tmp_path, model_init_kwargs={"revision": 5, "no_such_option": object()}).train()


def test_a_model_of_images_and_text_is_loaded_with_its_language_head(tmp_path: Path) -> None:
    llava().save_pretrained(tmp_path / "model")
    args = MultiTaskTrainingArguments(output_dir=str(tmp_path / "run"), use_cpu=True, report_to="none")
    task = Task(name="own", peft_config=LoraConfig(target_modules=["q_proj"]), train_dataset=[{"input_ids": [3, 4]}])
    trainer = MultiTaskTrainer(str(tmp_path / "model"), args, [task])
    assert type(trainer.model.backbone).__name__ == "LlavaForConditionalGeneration"


@pytest.mark.slow
def test_every_call_of_the_package_says_whether_code_may_run() -> None:
    """Where it is left open, transformers asks on standard input."""
    silent, said = [], 0
    for path in sorted((ROOT / "peft_mux").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            whose = ast.unparse(node.func.value)
            is_auto = (whose.startswith("Auto") and whose != "AutoHfQuantizer") or "auto_class" in whose
            if is_auto and node.func.attr in ("from_pretrained", "from_config"):
                is_said = any(keyword.arg == "trust_remote_code" for keyword in node.keywords)
                said += is_said
                silent += [] if is_said else [f"{path.name}:{node.lineno}"]
    assert silent == []
    assert said >= 6
