"""Configurations at random, of every field of the arguments, of a task, of an adapter and of a file.

Each is refused with the package's own error, or it trains: two steps, of every accepted one or of every so many.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from transformers import TrainerCallback, TrainingArguments

from peft_mux import EarlyStopping, GenerateOptions, MultiTaskTrainer, MultiTaskTrainingArguments, PeftMuxError, Task
from peft_mux.cli.config_file import read_config
from peft_mux.task import TASK_FIELDS
from tests.attacks.attack_lab import COUNT, how_many, nano_llama, nano_task, rows, words_tokenizer

pytestmark = pytest.mark.timeout(600)

# ------------------------------------------------------------------------ what is drawn

WORDS = "a none auto linear cosine steps epoch True 1e-3 -1 ../x %s adamw_torch sgd adafactor polynomial constant"
TEXTS = ["", " ", "\xe9", "\0", *WORDS.split(), "mux", "together", "drop", "all-linear", "q_proj"]
NUMBERS = [0, 1, -1, 2, 3, 7, 10**9, 10**30, -(10**30), 0.0, 0.5, 1.0, -0.5, 1e-30, 1e30, 1e308, -1e308]
NUMBERS += [float("nan"), float("inf"), -float("inf")]

scalars = st.one_of(
    st.sampled_from([None, True, False, *NUMBERS, *TEXTS]),
    st.integers(-3, 40),
    st.floats(-2, 2),
    st.text(max_size=8),
)
plain = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(TEXTS), st.text(max_size=4)), inner, max_size=3),
    ),
    max_leaves=6,
)
objects = st.sampled_from(
    [b"bytes", object(), int, len, (1, 2), {1, 2}, torch.float32, torch.zeros(2), Path("x"), range(3), 1j, Ellipsis]
)
anything = st.one_of(plain, plain, objects)
Made = tuple[list[Task], MultiTaskTrainingArguments]
"""What a configuration that is accepted comes to."""


class StopAfterTwo(TrainerCallback):
    """Ends a run after its second step, however many were asked for."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= 2:
            control.should_training_stop = True


def train_two_steps(tasks: list[Task], args: MultiTaskTrainingArguments) -> bool:
    """Train two steps, and return whether any was taken; what may come out is an error of the package."""
    trainer = MultiTaskTrainer(
        nano_llama(), args, tasks, processing_class=words_tokenizer(), callbacks=[StopAfterTwo()]
    )
    trainer.train()
    has_trained = trainer.state.global_step >= 1
    assert has_trained or all(status != "succeeded" for status in trainer.task_statuses.values())
    return has_trained


def trains_or_is_refused(tasks: list[Task], args: MultiTaskTrainingArguments) -> bool:
    """Train two steps, and return whether any was taken; an error of the package, before or after, is an answer too."""
    try:
        return train_two_steps(tasks, args)
    except PeftMuxError as error:
        assert str(error)  # noqa: PT017 it may as well train
        return False


@pytest.fixture(autouse=True)
def _settings_of_torch_stay() -> Any:
    """Put back what some arguments set for the whole process."""
    before = dict(os.environ)
    yield
    torch.use_deterministic_algorithms(False)
    for name in os.environ.keys() - before.keys():
        del os.environ[name]


# ------------------------------------------------------------------------ arguments of a run

SAFE = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
ARGUMENTS = sorted({item.name for item in fields(MultiTaskTrainingArguments) if item.init} - {"output_dir", "use_cpu"})
OWN = sorted(MultiTaskTrainingArguments.__annotations__.keys() - {"cuda_graphs"})

NEAR_VALID: dict[str, list[Any]] = {
    "planner": ["mux", "together", "interleaved", "sequential"],
    "overlong_policy": ["truncate", "drop", "error"],
    "quarantine_policy": ["quarantine", "stop"],
    "pipeline_schedule": ["mux", "1f1b", "gpipe", "interleaved_1f1b"],
    "pipeline_flush": ["auto", "every_step"],
    "dispatch": ["balanced", "length", "uniform"],
    "replicas": ["<1,1>", "<2,1>", "<1,1>x0", "<1,1>x1", "<0,1>", "1,1", "<1,1>x99999999999"],
    "memory_limit_gib": [0.001, 1, 1000, 1e-9],
    "max_tokens_per_micro_batch": [1, 7, 8, 4096],
    "chunk_size": [1, 4, 64, 100000],
    "lr_scheduler_type": ["linear", "cosine", "polynomial", "constant", "inverse_sqrt", "warmup_stable_decay"],
    "lr_scheduler_kwargs": [
        {},
        {"power": -1000},
        {"num_cycles": "a"},
        {"lr_end": 1.0},
        {"stranger": 1},
        '{"power": 2}',
    ],
    "optim": [
        "adamw_torch",
        "sgd",
        "adagrad",
        "rmsprop",
        "adafactor",
        "adamw_bnb_8bit",
        "lion_32bit",
        "adamw_apex_fused",
    ],
    "optim_args": ["", "a", "a=b", "eps=1", "momentum=0.9", "betas=1", "=,=", "lr=5"],
    "torch_compile_backend": ["inductor"],
    "eval_strategy": ["steps", "epoch", "no"],
    "logging_strategy": ["steps", "epoch", "no"],
    "bf16": [True, False],
    "gradient_checkpointing": [True, False],
    "gradient_checkpointing_kwargs": [{}, {"use_reentrant": True}, {"stranger": 1}],
}


def drawn_fields(
    names: list[str], near_valid: dict[str, list[Any]] = NEAR_VALID, others: Any = anything, *, at_most: int = 3
) -> st.SearchStrategy[dict[str, Any]]:
    """Return a strategy of some fields with values, some of which are nearly or wholly valid."""

    def value_of(name: str) -> st.SearchStrategy[Any]:
        near = near_valid.get(name)
        return others if near is None else st.one_of(st.sampled_from(near), st.sampled_from(near), others)

    one = st.sampled_from(names).flatmap(lambda name: st.tuples(st.just(name), value_of(name)))
    return st.lists(one, min_size=1, max_size=at_most).map(dict)


def arguments(drawn: dict[str, Any], folder: Path) -> Made:
    args = MultiTaskTrainingArguments(output_dir=str(folder / "run"), **{**SAFE, **drawn})
    return [nano_task("a", 1, max_steps=2), nano_task("b", 2, max_steps=2)], args


def argument_strategy() -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        drawn_fields(OWN), drawn_fields(sorted(NEAR_VALID.keys() & set(ARGUMENTS))), drawn_fields(ARGUMENTS)
    )


@pytest.mark.parametrize("path", ["", "\0", 5, b"run", ["run"], "x" * 5000], ids=ascii)
def test_an_output_folder_that_is_none_is_refused(path: Any) -> None:
    with pytest.raises(PeftMuxError, match="output_dir"):
        MultiTaskTrainingArguments(output_dir=path, **SAFE)


def test_every_argument_is_among_those_that_are_drawn() -> None:
    assert {item.name for item in fields(TrainingArguments) if item.init} - set(ARGUMENTS) == {"output_dir", "use_cpu"}


# ------------------------------------------------------------------------ fields of a task


class Endless:
    """A stream of sound rows."""

    def __iter__(self) -> Any:
        """Yield rows for ever."""
        while True:
            yield from rows(1)


TASK_VALUES: dict[str, list[Any]] = {
    "name": ["a", "A-1", "x" * 64],
    "peft_config": [LoraConfig(r=1), LoraConfig(r=2, target_modules="all-linear"), {"r": 8}, "lora"],
    "train_dataset": [
        rows(1),
        rows(2, 1),
        [],
        [{}],
        [None],
        {"train": rows(1)},
        Endless(),
        [{"text": "a b c"}],
        "rows",
    ],
    "eval_dataset": [rows(3, 2), [], [{}], [{"text": "a b"}], [{"input_ids": [1]}]],
    "early_stopping": [EarlyStopping(), EarlyStopping(metric="own"), EarlyStopping(patience=1, min_delta=1e30), {}],
    "compute_metrics": [lambda _: {"own": 1.0}, lambda _: None, len],
    "preprocess_logits_for_metrics": [lambda logits, labels: logits, len],
    "callbacks": [[], [TrainerCallback()], [5], TrainerCallback],
    "objective": ["sft", "dpo", "orpo", "kto", "policy", "distill", lambda outputs: outputs.nll_M, len],
    "loss_type": ["nll", "mse", "sigmoid", ["sigmoid", "sft"], "grpo"],
    "objective_args": [{}, {"beta": 0.1}, {"beta": float("nan")}, {"needs_reference": True}, {"stranger": 1}],
    "eval_generate": [True, False, GenerateOptions(max_new_tokens=2), GenerateOptions(metrics=len), {}],
    "chat_template": ["{{ messages }}", "{% for", ""],
    "max_steps": [1, 2, 10**9, -1],
    "max_length": [2, 3, 10**9],
    "train_batch_size": [1, 5, 2**20],
    "data_timeout_s": [0.5, 60],
    **{key: NEAR_VALID[key] for key in ("optim", "optim_args", "lr_scheduler_type", "lr_scheduler_kwargs")},
}


def tasks(drawn: dict[str, Any], folder: Path) -> Made:
    config = LoraConfig(r=2, target_modules=["q_proj"])
    base = {"name": "own", "peft_config": config, "train_dataset": rows(1), "train_batch_size": 2, "max_steps": 2}
    task = Task(**{**base, **drawn})
    args = MultiTaskTrainingArguments(output_dir=str(folder / "run"), **SAFE)
    return [replace(task, max_steps=2), nano_task("beside", 3, max_steps=2)], args


# ------------------------------------------------------------------------ fields of an adapter

LORA_FIELDS = sorted(item.name for item in fields(LoraConfig) if item.init)
LORA_VALUES: dict[str, list[Any]] = {
    "r": [0, 1, 3, 16, 17, 10**6, 2.0, "8"],
    "lora_alpha": [0, 1, 16, -4, 1e30, float("nan")],
    "lora_dropout": [0.0, 0.5, 1.0, 1.5, -1],
    "target_modules": [
        "all-linear",
        "q_proj",
        ["q_proj", "v_proj"],
        [],
        ["nothing"],
        ".*proj",
        "(",
        ["lm_head"],
        [5],
        "(a*)*b",
    ],
    "exclude_modules": ["q_proj", ["v_proj"], ".*", "("],
    "rank_pattern": [{}, {"q_proj": 4}, {"q_proj": 0}, {"(": 2}, {"q_proj": "four"}, 5],
    "alpha_pattern": [{}, {"q_proj": 4}, {"q_proj": "four"}, 5],
    "layers_to_transform": [0, [0], [7], -1, "0"],
    "layers_pattern": ["layers", ["layers"], "(", 5],
    "bias": ["none", "all", "lora_only", "some"],
    "task_type": ["CAUSAL_LM", "SEQ_CLS", "SEQ_2_SEQ_LM", "nonsense"],
    "init_lora_weights": [True, False, "gaussian", "pissa", "olora", "nonsense", "eva", "loftq"],
    "modules_to_save": [["lm_head"], ["embed_tokens"], "lm_head", [5]],
    "use_rslora": [True, False],
    "use_dora": [True, False],
    "fan_in_fan_out": [True, False],
    "peft_type": ["LORA", "IA3", "NONE", 5],
    "target_parameters": [["q_proj.weight"], ["x"], 5],
    "layer_replication": [[[0, 1]], [[0, 1], [0, 1]], 5],
    "trainable_token_indices": [[1, 2], {"embed_tokens": [1]}, [10**9]],
}


def adapters(drawn: dict[str, Any], folder: Path) -> Made | None:
    try:
        config = LoraConfig(**{"r": 2, "target_modules": ["q_proj"], **drawn})
    except Exception:  # PEFT's own refusal, in the line of the user's script that makes the configuration
        return None
    args = MultiTaskTrainingArguments(output_dir=str(folder / "run"), **SAFE)
    return [nano_task("own", 1, peft_config=config, max_steps=2), nano_task("beside", 2, max_steps=2)], args


# ------------------------------------------------------------------------ files


def sound_file(folder: Path) -> dict[str, Any]:
    """Return a configuration that can be read, and write what it reads."""
    nano_llama().save_pretrained(folder / "model")
    words_tokenizer().save_pretrained(folder / "model")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows(1)), encoding="utf-8")
    return {
        "model": "model",
        "output_dir": str(folder / "run"),
        "run": {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "max_steps": 2},
        "defaults": {"dataset": "rows.jsonl", "train_batch_size": 2, "peft": {"type": "lora", "r": 2}},
        "tasks": {"one": {"learning_rate": 1e-3}, "two": {"seed": 5, "peft": {"r": 4, "target_modules": "all-linear"}}},
    }


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every mapping entry of a structure."""
    found = []
    for key, value in node.items() if isinstance(node, dict) else ():
        found += [(*path, key), *places(value, (*path, key))]
    return found


def changed(node: Any, path: tuple[Any, ...], act: str, value: Any) -> Any:
    """Return a copy of a structure in which something was done to one entry."""
    node = dict(node)
    key, *rest = path
    if rest:
        node[key] = changed(node[key], tuple(rest), act, value)
    elif act == "delete":
        del node[key]
    elif act == "rename":
        node[value if isinstance(value, (str, int, float, bool, type(None))) else "x"] = node.pop(key)
    elif act == "add" and isinstance(node[key], dict):
        node[key] = {**node[key], value if isinstance(value, (str, int, float, bool)) else "x": value}
    else:
        node[key] = value
    return node


SOUND_CHANGES: list[tuple[tuple[str, ...], str, Any]] = [
    (("tasks", "one", "learning_rate"), "replace", 0.01),
    (("tasks", "two", "seed"), "replace", 9),
    (("tasks", "two", "seed"), "delete", None),
    (("tasks", "two", "peft", "r"), "replace", 3),
    (("tasks", "two", "peft", "target_modules"), "replace", ["q_proj", "v_proj"]),
    (("tasks", "two", "peft", "target_modules"), "delete", None),
    (("tasks", "two"), "delete", None),
    (("tasks", "one"), "rename", "three"),
    (("tasks", "two"), "rename", "A-1"),
    (("defaults", "train_batch_size"), "replace", 3),
    (("defaults", "train_batch_size"), "delete", None),
    (("defaults", "peft", "r"), "replace", 1),
    (("run", "max_steps"), "replace", 1),
    (("run", "report_to"), "replace", []),
    (("output_dir",), "replace", "elsewhere"),
]


SPLICES = ["\n", ":", "- ", "{", "}", "[", "]", "&a ", "*a", "<<: *a", "? ", "|", ">", "'", '"', "#", "\t", "yes", "~"]
SPLICES += ["%YAML 9.9\n", "---\n", "...\n", "\x00", "\x85", "\ufeff", "0o7", "1_0", "!!set {a, b}", "!!binary "]
SPLICES += ["!!python/object:os.system "]


def file_strategy(base: dict[str, Any]) -> st.SearchStrategy[str]:
    """Return a strategy of texts of files: structures with entries changed, and texts with pieces spliced in."""
    acts = st.sampled_from(["replace", "replace", "delete", "rename", "add"])
    one = st.tuples(st.sampled_from(places(base)), acts, plain)

    def dumped(changes: list[Any]) -> str:
        node = base
        for path, act, value in changes:
            try:
                node = changed(node, path, act, value)
            except (KeyError, TypeError, AttributeError, ValueError):
                continue  # an earlier change has taken the place away
        return yaml.safe_dump(node, allow_unicode=True)

    text = yaml.safe_dump(base)
    piece = st.one_of(st.sampled_from(SPLICES), st.text(max_size=3))
    spliced = st.lists(st.tuples(st.integers(0, len(text)), piece, st.integers(0, 5)), min_size=1, max_size=3).map(
        lambda edits: _spliced(text, edits)
    )
    sound = st.lists(st.sampled_from(SOUND_CHANGES), min_size=1, max_size=3)
    odd = st.lists(one, min_size=1, max_size=2)
    return st.one_of(sound.map(dumped), odd.map(dumped), st.tuples(sound, odd).map(sum_of).map(dumped), spliced)


def sum_of(lists: tuple[list[Any], list[Any]]) -> list[Any]:
    """Return both lists as one."""
    return [*lists[0], *lists[1]]


def _spliced(text: str, edits: list[tuple[int, str, int]]) -> str:
    for place, piece, num_dropped in edits:
        text = text[:place] + piece + text[place + num_dropped :]
    return text


def files(text: str, folder: Path) -> Made | None:
    path = folder / "tasks.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    config = read_config(path)
    # On another device nothing is trained here.
    return ([replace(task, max_steps=2) for task in config.tasks], config.args) if config.args.use_cpu is True else None


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder into which what `datasets` keeps goes too."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


# ------------------------------------------------------------------------ all of them

KINDS: dict[str, tuple[Callable[[Path], st.SearchStrategy[Any]], Callable[[Any, Path], Made | None], int]] = {
    "arguments": (lambda _: argument_strategy(), arguments, 4),
    "tasks": (lambda _: drawn_fields(TASK_FIELDS, TASK_VALUES, at_most=4), tasks, 2),
    "adapters": (lambda _: drawn_fields(LORA_FIELDS, LORA_VALUES, plain), adapters, 1),
    "files": (lambda folder: file_strategy(sound_file(folder)), files, 4),
}
"""What is drawn, what is made of it, and which share of what is accepted trains: every so many."""


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("arguments", 40),
        ("tasks", 40),
        ("adapters", 15),
        ("files", 40),
        pytest.param("arguments", how_many(usually=200, full=1500), marks=pytest.mark.slow),
        pytest.param("tasks", how_many(usually=200, full=1500), marks=pytest.mark.slow),
        pytest.param("adapters", how_many(usually=80, full=1000), marks=pytest.mark.slow),
        pytest.param("files", how_many(usually=150, full=1000), marks=pytest.mark.slow),
    ],
)
def test_what_is_drawn_at_random_is_refused_by_name_or_trains(
    kind: str, count: int, folder: Path, record_property: Any
) -> None:
    strategy, make, every = KINDS[kind]
    drawn = accepted = trained = 0

    def try_one(one: Any) -> None:
        nonlocal drawn, accepted, trained
        drawn += 1
        try:
            made = make(one, folder)
        except PeftMuxError as error:
            assert str(error)  # noqa: PT017 it may as well be accepted
            return
        if made is None:
            return
        accepted += 1
        if accepted % every == 0:
            some, args = made
            args.output_dir = str(folder / f"run-{accepted}")
            trained += trains_or_is_refused(some, args)

    @settings(max_examples=count, deadline=None, derandomize=True)
    @given(strategy(folder))
    def explore(one: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try_one(one)

    explore()
    print(f"{kind}: {drawn} drawn, {accepted} accepted, {trained} of them trained two steps")
    # What Hypothesis draws depends on the modules that are loaded, so a few may all be accepted or all be refused.
    if drawn >= 80:
        assert trained
    if drawn >= 150:
        assert 0 < accepted < drawn
    record_property(COUNT, drawn)


# ------------------------------------------------------------------------ hostile files


def _bomb_line(inner: str, outer: str) -> str:
    return f"{outer}: &{outer} [{', '.join([f'*{inner}'] * 9)}]\n"


HOSTILE_FILES = {
    "a bomb of aliases": "a: &a [x]\n" + "".join(map(_bomb_line, "abcdefgh", "bcdefghi")),
    "a list within itself": "model: &a [*a]\n",
    "a mapping within itself": "model: x\ntasks: &t {a: *t}\n",
    "deep lists": "model: " + "[" * 2000 + "]" * 2000,
    "deep mappings": "model: " + "{a: " * 2000 + "1" + "}" * 2000,
    "an object of Python": "model: !!python/object/apply:os.system ['touch attacked']\n",
    "a key that is a list": "? [1, 2]\n: 3\n",
    "keys that are true": "model: x\nyes: 1\nno: 2\ntasks: {on: {}}\n",
    "Latin-1": b"model: caf\xe9\n",
    "a null character": "model: \x00\n",
    "nothing": "",
    "a text": "hello",
    "a number of many digits": "model: " + "9" * 10**5,
    "UTF-16": "model: x\n".encode("utf-16"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", HOSTILE_FILES)
def test_a_hostile_file_is_refused_by_name_and_at_once(kind: str, folder: Path) -> None:
    content = HOSTILE_FILES[kind]
    path = folder / "tasks.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(PeftMuxError, match=r"tasks\.yaml"):
        read_config(path)
    assert not (folder / "attacked").exists()


def read_and_train(path: Path) -> None:
    config = read_config(path)
    train_two_steps(config.tasks, config.args)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv"])
@pytest.mark.parametrize(
    "content", [b"caf\xe9\n", b'{"text": "caf\xe9"}\n', b"\x00", b"", b"[" * 5000, b"{}\n", b"\xff\xfe"]
)
def test_hostile_rows_of_a_file_are_refused_by_name(name: str, content: bytes, folder: Path) -> None:
    base = sound_file(folder)
    (folder / name).write_bytes(content)
    base["tasks"]["one"]["dataset"] = name
    path = folder / "tasks.yaml"
    path.write_text(yaml.safe_dump(base), encoding="utf-8")
    with pytest.raises(PeftMuxError, match="one"):
        read_and_train(path)
