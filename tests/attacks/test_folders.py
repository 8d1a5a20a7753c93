"""Hostile names, hostile model folders and hostile rows: nothing is written elsewhere, and no code of theirs is run."""

from __future__ import annotations

import ast
import builtins
import json
import os
import pickle
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from peft_mux import CheckpointError, ConfigError, MultiTaskPeftModel, PeftMuxError, storage
from tests.attacks import attack_lab as attacks
from tests.attacks.attack_lab import COUNT, nano_llama, nano_task, words_tokenizer
from tests.attacks.run_files import SAVING, snapshot
from tests.paths import ROOT
from tests.runs import raising, stop

pytestmark = pytest.mark.timeout(60)

# ------------------------------------------------------------------------ names

PATHS = r". .. ../outside /abs a/b a\b ..\outside a/../../outside C: C:\x a:b a. a.b .hidden -rf _a"
DEVICES = "~ $HOME %2e%2e a* a|b a;b con CON prn aux NUL com0 com1 lpt0 LPT9"
OURS = "state State run tmp plan config metrics"
HOSTILE_NAMES: list[Any] = [*PATHS.split(), *DEVICES.split(), *OURS.split()]
HOSTILE_NAMES += ["", "a\0b", "a\nb", "a\n", " a", "a ", "a b", "a'b", 'a"b', "a" * 65, "a" * 300]
# Letters that look like others, marks that hide or turn, and digits that are none of ASCII.
HOSTILE_NAMES += ["\xe9", "\u0430", "a\u0301", "a\u202eb", "a\u200b", "\ud800", "\uff21", "\u0663"]
HOSTILE_NAMES += [None, 5, True, b"bytes", ["a"], {"a": 1}, Path("a")]


@pytest.mark.parametrize("name", HOSTILE_NAMES, ids=lambda name: ascii(name)[:40])
def test_a_hostile_name_is_refused_and_nothing_is_written_elsewhere(name: Any, tmp_path: Path) -> None:
    refused = r"must be (1 to 64 letters, digits, '_' and '-'|any name except)"
    with pytest.raises(ConfigError, match=rf"^task\.name {refused}") as caught:
        nano_task(name)
    assert len(str(caught.value)) < 400, "a long name is not repeated in full"
    assert not {"\0", "\n"} & set(str(caught.value))
    with pytest.raises(CheckpointError, match=refused):
        storage.safe_child(tmp_path, name)
    if isinstance(name, str):
        config = nano_task("a").peft_config
        with suppress(PeftMuxError):  # a name of an adapter, which is a part of its folder, may be as good as any other
            model = MultiTaskPeftModel(nano_llama(), {name: config}, verify=False)
            model.save_pretrained(tmp_path / "models" / "own")
    assert {path.name for path in tmp_path.iterdir()} <= {"models"}


WORDS = "mlp self_attn weight lora_A lora_B default default2 other_default efaul 0 base_model layers base_layer q_proj"
HONEST_NAMES = [*WORDS.split(), "a-b", "A" * 64]


def test_names_that_are_words_of_peft_do_no_harm(tmp_path: Path, record_property: Any) -> None:
    tasks = [nano_task(name, number) for number, name in enumerate(HONEST_NAMES)]
    together = attacks.train(tasks, tmp_path / "together", **SAVING)
    assert set(together.statuses.values()) == {"succeeded"}
    for name in HONEST_NAMES:
        alone = MultiTaskPeftModel(nano_llama(), {"other": nano_task("a").peft_config}, verify=False)
        alone.load_task("other", tmp_path / "together" / name)
        saved = {key: value.clone() for key, value in alone.task_parameters("other").items()}
        trained = together.trainer.model.task_parameters(name)
        assert saved.keys() == trained.keys()
        assert all((saved[key] == trained[key]).all() for key in saved), name
    record_property(COUNT, len(HONEST_NAMES))


def test_names_that_differ_in_case_alone_are_refused_next_to_each_other(tmp_path: Path) -> None:
    with pytest.raises(PeftMuxError, match="case"):
        attacks.make_trainer([nano_task("Own"), nano_task("oWN")], tmp_path)


# ------------------------------------------------------------------------ code that comes with a model or an adapter


@pytest.fixture
def no_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where something is asked for on the standard input."""

    def refuse(*args: Any) -> Any:
        raise AssertionError(f"it was asked on the standard input: {args}")

    class Closed:
        def isatty(self) -> bool:
            return True

        readline = read = readlines = refuse

    monkeypatch.setattr(builtins, "input", refuse)
    monkeypatch.setattr(sys, "stdin", Closed())


def model_folder(folder: Path, marker: Path) -> Path:
    """Return a folder whose configuration, weights and tokenizer name code that leaves a marker."""
    nano_llama().save_pretrained(folder)
    words_tokenizer().save_pretrained(folder)
    (folder / "attack.py").write_text(
        f"from pathlib import Path\nPath({str(marker)!r}).touch()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast\n"
        "class Config(LlamaConfig):\n    model_type = 'attack'\n"
        "class Model(LlamaForCausalLM):\n    config_class = Config\n"
        "class Tokenizer(PreTrainedTokenizerFast):\n    pass\n",
        encoding="utf-8",
    )
    return folder


def change_json(path: Path, **values: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, **values}), encoding="utf-8")


REMOTE = {
    "AutoConfig": "attack.Config",
    "AutoModelForCausalLM": "attack.Model",
    "AutoTokenizer": ["attack.Tokenizer", "attack.Tokenizer"],
}


@pytest.mark.parametrize("where", ["config of an unknown type", "config", "tokenizer"])
def test_code_that_comes_with_a_model_is_neither_run_nor_asked_about(
    where: str, no_questions: None, tmp_path: Path
) -> None:
    marker = tmp_path / "run by the attacker"
    folder = model_folder(tmp_path / "model", marker)
    if where == "tokenizer":
        change_json(folder / "tokenizer_config.json", auto_map=REMOTE, tokenizer_class="Tokenizer")
    else:
        unknown = {"model_type": "attack"} if where == "config of an unknown type" else {}
        change_json(folder / "config.json", auto_map=REMOTE, **unknown)
    try:
        trainer = attacks.make_trainer([nano_task("own", max_steps=1)], tmp_path / "run", model=str(folder))
        trainer.train()
    except PeftMuxError as error:
        assert "model" in str(error) or "trust_remote_code" in str(error)  # noqa: PT017 it may as well train
    assert not marker.exists()


class Exploit:
    """Makes a file where its pickle is opened."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickled_weights_of_a_model_run_no_code(name: str, no_questions: None, tmp_path: Path) -> None:
    marker = tmp_path / "run by the attacker"
    folder = model_folder(tmp_path / "model", marker)
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(Exploit(marker)))
    with pytest.raises(PeftMuxError, match="model"):
        attacks.make_trainer([nano_task("own", max_steps=1)], tmp_path / "run", model=str(folder)).train()
    assert not marker.exists()


def test_pickled_weights_of_an_adapter_or_a_run_run_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, marker = tmp_path / "run", tmp_path / "run by the attacker"
    attacks.train([nano_task("own")], folder, at_end={2: stop}, **SAVING)
    bomb = pickle.dumps(Exploit(marker))
    names = "optimizer.pt scheduler.pt rng_state.pth training_args.bin adapter_model.bin pytorch_model.bin state.pkl"
    for path in (folder, folder / "state", folder / "own"):
        for name in names.split():
            (path / name).write_bytes(bomb)
    pickle.loads(bomb)
    assert marker.is_dir(), "the bomb is a dud"
    marker.rmdir()
    monkeypatch.setattr(torch, "load", raising(AssertionError("a pickle was opened")))
    assert attacks.train([nano_task("own")], folder, resume=True, **SAVING).statuses == {"own": "succeeded"}
    (folder / "own" / "adapter_model.safetensors").unlink()
    with pytest.raises(PeftMuxError):
        MultiTaskPeftModel.from_pretrained(nano_llama(), folder)
    assert not marker.exists()


ADAPTER_CONFIGS: dict[str, Any] = {
    "another type": {"peft_type": "NONE"},
    "a type that is a list": {"peft_type": ["LORA"]},
    "no type": {"peft_type": None},
    "a rank below zero": {"r": -1},
    "a rank beyond memory": {"r": 2**60},
    "a rank that is a text": {"r": "8"},
    "targets that are a number": {"target_modules": 5},
    "targets that backtrack": {"target_modules": "(a+)+$" * 8},
    "a base that leads out": {"base_model_name_or_path": "../../../etc/passwd"},
    "code of its own": {"auto_mapping": {"base_model_class": "Exploit", "parent_library": "os"}},
    "a stranger": {"stranger": 1},
    "a runtime config": {"runtime_config": {"ephemeral_gpu_offload": True}},
}


@pytest.mark.parametrize("content", [*ADAPTER_CONFIGS, "null", "[]", "5", "not JSON"])
def test_a_hostile_adapter_config_is_refused_or_harmless(content: str, no_questions: None, tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    MultiTaskPeftModel(nano_llama(), {"own": nano_task("a").peft_config}, verify=False).save_pretrained(folder)
    path = folder / "own" / "adapter_config.json"
    for checksums in (folder / "own").glob("*checksums*"):
        checksums.unlink()  # the attacker knows of them
    if content in ADAPTER_CONFIGS:
        change_json(path, **ADAPTER_CONFIGS[content])
    else:
        path.write_text(content, encoding="utf-8")
    before = snapshot(tmp_path)
    try:
        MultiTaskPeftModel.from_pretrained(nano_llama(), folder)
    except PeftMuxError as error:
        assert "own" in str(error)  # noqa: PT017 it may as well be harmless
    assert snapshot(tmp_path) == before


# ------------------------------------------------------------------------ what the package may not call

FORBIDDEN_CALLS = {*"eval exec compile __import__ input os.system os.popen torch.load torch.save pickle.load".split()}
FORBIDDEN_CALLS |= {*"pickle.loads marshal.loads yaml.unsafe_load yaml.full_load shelve.open joblib.load".split()}
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
FORBIDDEN_WORDS = {"trust_remote_code": True, "allow_pickle": True, "shell": True, "weights_only": False}


def faults_of_source(path: Path) -> Iterator[str]:
    """Yield each place of a file that could run code that comes with data."""
    source = path.read_text(encoding="utf-8")
    loaders_allowed = ["yaml.SafeLoader", *(["_Loader"] if "class _Loader(yaml.SafeLoader):" in source else [])]
    for node in ast.walk(ast.parse(source)):
        line = f"{path.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            yield from (f"{line} imports {name}" for name in names if name.split(".")[0] in FORBIDDEN_MODULES)
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in FORBIDDEN_CALLS:
            yield f"{line} calls {called}"
        if called in ("yaml.load", "yaml.load_all", "yaml.compose"):
            loaders = [ast.unparse(word.value) for word in node.keywords if word.arg == "Loader"]
            if len(loaders) != 1 or loaders[0] not in loaders_allowed:
                yield f"{line} calls {called} with {loaders}"
        words = {
            word.arg: word.value.value for word in node.keywords if word.arg and isinstance(word.value, ast.Constant)
        }
        said = [word for word, value in FORBIDDEN_WORDS.items() if word in words and words[word] == value]
        yield from (f"{line} says {word}={words[word]}" for word in said)


def test_the_package_calls_nothing_that_runs_code_of_data(record_property: Any) -> None:
    paths = sorted((ROOT / "peft_mux").rglob("*.py"))
    assert len(paths) > 100
    assert not [fault for path in paths for fault in faults_of_source(path)]
    record_property(COUNT, len(FORBIDDEN_CALLS) + len(FORBIDDEN_MODULES) + len(FORBIDDEN_WORDS))


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "torch.load(path)",
        "eval('1')",
        "yaml.load(text)",
        "yaml.load(text, Loader=yaml.Loader)",
        "yaml.load(text, Loader=_Loader)",
        "f(trust_remote_code=True)",
        "subprocess.run('ls', shell=True)",
    ],
)
def test_such_a_call_would_be_found(line: str, tmp_path: Path) -> None:
    path = tmp_path / "source.py"
    path.write_text(line, encoding="utf-8")
    assert list(faults_of_source(path))
