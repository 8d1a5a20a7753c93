"""`tasks.yaml`: the same objects as in Python, and every fault by line, key and way out; never a traceback."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import datasets
import pytest
from peft import LoraConfig

from peft_mux import BottleneckConfig, load_rows
from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.cli.config_file import RunConfig, parse_value, read_config
from peft_mux.errors import ConfigError
from peft_mux.modeling.sampling import GenerateOptions
from peft_mux.task import EarlyStopping, Task
from tests.cli.lab import write_rows
from tests.shell import Shell

ROWS = [{"prompt": f"say {n}", "completion": f" n{n}"} for n in range(6)]
EVAL_ROWS = [{"prompt": "say 9", "completion": " 9"}]
GOOD = """\
model: my-model
output_dir: {output_dir}
run: {{use_cpu: true, logging_steps: 10, max_length: 99, report_to: none}}
defaults:
  learning_rate: 2e-4
  peft: {{type: lora, r: 16, target_modules: all-linear}}
tasks:
  sql:
    dataset: rows.jsonl
    num_train_epochs: 3
    seed: 7
  math:
    dataset: rows.csv
    eval_dataset: held_out.json
    peft: {{r: 64}}
    learning_rate: 1e-5
    max_steps: 20
    shuffle: false
    optim: sgd
    lr_scheduler_type: cosine
    early_stopping: {{patience: 2, min_delta: 0.1}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with rows in it."""
    write_rows(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "held_out.json").write_text(json.dumps(EVAL_ROWS), encoding="utf-8")
    csv = "prompt,completion\n" + "".join(f"{row['prompt']},{row['completion']}\n" for row in ROWS)
    (tmp_path / "rows.csv").write_text(csv, encoding="utf-8")
    return tmp_path


def write(folder: Path, text: str) -> Path:
    path = folder / "tasks.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def good(folder: Path) -> str:
    return GOOD.format(output_dir=folder / "out")


def read(folder: Path, *overrides: str) -> RunConfig:
    """Read the good file, changed as `--set` does it."""
    return read_config(write(folder, good(folder)), list(overrides))


def plain(task: Task) -> dict[str, Any]:
    """Return all fields of a task as values that can be compared."""
    values = {item.name: getattr(task, item.name) for item in fields(task)}
    for name in ("train_dataset", "eval_dataset"):
        values[name] = None if values[name] is None else [dict(row) for row in values[name]]
    values["peft_config"] = task.peft_config.to_dict()
    return values


# ------------------------------------------------------------- the same as Python


def test_a_file_gives_the_same_arguments_and_tasks_as_python(folder: Path) -> None:
    config = read(folder)
    args = MultiTaskTrainingArguments(
        output_dir=str(folder / "out"), use_cpu=True, logging_steps=10, max_length=99, report_to="none"
    )
    tasks = [
        Task(
            name="sql",
            peft_config=LoraConfig(r=16, target_modules="all-linear"),
            train_dataset=ROWS,
            learning_rate=2e-4,
            num_train_epochs=3,
            seed=7,
        ),
        Task(
            name="math",
            peft_config=LoraConfig(r=64, target_modules="all-linear"),
            train_dataset=ROWS,
            eval_dataset=EVAL_ROWS,
            learning_rate=1e-5,
            max_steps=20,
            shuffle=False,
            optim="sgd",
            lr_scheduler_type="cosine",
            early_stopping=EarlyStopping(patience=2, min_delta=0.1),
        ),
    ]
    assert [plain(task) for task in config.tasks] == [plain(task) for task in tasks]
    assert config.args.to_dict() == args.to_dict()
    assert (config.model, config.tokenizer, config.model_init_kwargs) == ("my-model", None, {})


def test_all_paths_are_relative_to_the_folder_of_the_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("my-model", "elsewhere"):
        (folder / name).mkdir()
    (folder / "profile.json").write_text("{}")
    text = GOOD.format(output_dir="runs/a").replace("run: {", "run: {cost_profile: profile.json, ")
    monkeypatch.chdir(folder / "elsewhere")
    config = read_config(Path("..") / write(folder, text).name)
    given = (config.model, config.args.output_dir, config.args.cost_profile)
    assert [Path(str(path)).resolve() for path in given] == [
        (folder / name).resolve() for name in ("my-model", "runs/a", "profile.json")
    ]
    assert len(config.tasks[0].train_dataset) == len(ROWS)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("tasks.sql.dataset", name) for name in ("data/absent.jsonl", "data/absent")),
        *(("defaults.init_adapter", "old/sql"), ("run.cost_profile", "profile.json")),
    ],
)
def test_the_fault_of_a_path_that_does_not_exist_says_where_it_would_be_and_the_rule(
    key: str, value: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError) as caught:
        read(folder, f"{key}={value}")
    said = f"There is no {folder / value}: paths are relative to the folder of the file."
    assert [fault.fix for fault in caught.value.faults] == [said] * len(caught.value.faults)


def test_numbers_are_read_as_people_write_them(folder: Path) -> None:
    for text in ("1e-4", "1E-4", "1.0e-4", "0.0001", ".0001", "1_0e-5"):
        config = read(folder, f"tasks.sql.learning_rate={text}")
        assert config.tasks[0].learning_rate == pytest.approx(1e-4)


def test_datasets_of_other_forms_and_parts_of_them_are_loaded(folder: Path) -> None:
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.to_parquet(folder / "saved.parquet")
    dataset.save_to_disk(str(folder / "saved"))
    for change, rows in (("dataset=saved.parquet", ROWS), ("dataset=saved", ROWS), ("split=train[:2]", ROWS[:2])):
        config = read(folder, f"tasks.sql.{change}")
        assert [dict(row) for row in config.tasks[0].train_dataset] == rows
    # Else the user would evaluate on the rows that are trained on.
    with pytest.raises(ConfigError, match="test"):
        read(folder, "tasks.sql.eval_split=test")


def test_a_task_of_another_type_takes_no_options_of_the_defaults_and_losses_are_read_as_in_python(folder: Path) -> None:
    text = """
  house: {dataset: rows.jsonl, peft: {type: bottleneck, bottleneck_size: 4, target_modules: [o_proj]}}
  pref:
    dataset: pairs.jsonl
    objective: dpo
    loss_type: [ipo, sft]
    objective_args: {beta: 0.2, loss_weights: [1, 0.1]}
"""
    pair = {"prompt": "a", "chosen": "b", "rejected": "c"}
    write_rows(folder / "pairs.jsonl", [pair])
    *_, house, pref = read_config(write(folder, GOOD.format(output_dir="out") + text.lstrip("\n"))).tasks
    assert house.peft_config == BottleneckConfig(bottleneck_size=4, target_modules=["o_proj"])
    assert pref.peft_config == LoraConfig(r=16, target_modules="all-linear")
    assert (pref.objective, pref.loss_type, pref.objective_args) == (
        "dpo",
        ["ipo", "sft"],
        {"beta": 0.2, "loss_weights": [1, 0.1]},
    )


@pytest.mark.parametrize(("size", "count"), [(2, 2), (0.5, 3)])
def test_a_part_of_the_rows_is_held_out_by_the_seed_of_the_task(size: float, count: int, folder: Path) -> None:
    def rows(*more: str) -> list[list[str]]:
        task, _ = read(folder, f"tasks.sql.val_size={size}", *more).tasks
        return [[row["prompt"] for row in own] for own in (task.train_dataset, task.eval_dataset)]

    train, held_out = rows()
    assert len(held_out) == count
    assert sorted(train + held_out) == sorted(row["prompt"] for row in ROWS)
    assert rows() == [train, held_out] != rows("tasks.sql.seed=8")
    assert rows("tasks.sql.shuffle=false")[1] == [row["prompt"] for row in ROWS[-count:]]


def test_held_out_rows_of_a_task_replace_those_of_the_defaults(folder: Path) -> None:
    sql, math = read(folder, "defaults.val_size=2").tasks
    assert (len(sql.eval_dataset), len(math.eval_dataset), len(math.train_dataset)) == (2, len(EVAL_ROWS), len(ROWS))
    (sql, _) = read(folder, "tasks.sql.eval_dataset={easy: rows.jsonl, hard: held_out.json}").tasks
    assert {name: len(own) for name, own in sql.eval_dataset.items()} == {"easy": len(ROWS), "hard": len(EVAL_ROWS)}


def test_data_sets_are_mixed_by_weight_or_joined_and_no_held_out_row_is_trained_on(folder: Path) -> None:
    others = [{"prompt": f"other {n}", "completion": "x"} for n in range(60)]
    write_rows(folder / "others.jsonl", others)
    parts = "tasks.sql.dataset=[{path: rows.jsonl, weight: 1}, {path: others.jsonl, weight: 3, split: 'train[:50]'}]"
    task = read(folder, parts, "tasks.sql.val_size=2").tasks[0]
    alone = load_rows(folder / "rows.jsonl"), load_rows(folder / "others.jsonl", "train[:50]")
    splits = [part.train_test_split(test_size=2, seed=7) for part in alone]
    mixed = datasets.interleave_datasets(
        [split["train"] for split in splits], [0.25, 0.75], seed=7, stopping_strategy="all_exhausted"
    )
    assert [dict(row) for row in task.train_dataset] == list(mixed)
    held_out = [row["prompt"] for row in task.eval_dataset]
    assert held_out == [row["prompt"] for split in splits for row in split["test"]]
    assert not {*held_out} & {row["prompt"] for row in task.train_dataset}
    joined = read(folder, "tasks.sql.dataset=[{path: rows.jsonl}, {path: others.jsonl}]").tasks[0]
    assert [dict(row) for row in joined.train_dataset] == ROWS + others


# --------------------------------------------------------------------- --set


def test_set_replaces_adds_and_makes_sections(folder: Path) -> None:
    overrides = [
        "tasks.sql.learning_rate=1e-3",
        "tasks.math.peft.lora_alpha=9",
        "run.save_steps=3",
        "model_init_kwargs.revision=abc",
        "tasks.math.early_stopping=null",
        "tasks.third={dataset: rows.jsonl, max_steps: 2}",
    ]
    config = read(folder, *overrides)
    sql, math, third = config.tasks
    assert (sql.learning_rate, math.learning_rate, third.learning_rate) == (1e-3, 1e-5, 2e-4)
    assert (math.peft_config.lora_alpha, math.peft_config.r, math.early_stopping) == (9, 64, None)
    assert (config.args.save_steps, config.model_init_kwargs) == (3, {"revision": "abc"})
    assert third.max_steps == 2


def test_what_evaluations_generate_is_a_section_or_true(folder: Path) -> None:
    given = "tasks.math.eval_generate={max_new_tokens: 8, metrics: [f1, contains], num_rows: 3, stop_strings: ['.']}"
    config = read(folder, given, "tasks.math.eval_generate.seed=5")
    wanted = GenerateOptions(max_new_tokens=8, metrics=["f1", "contains"], num_rows=3, stop_strings=["."], seed=5)
    assert config.tasks[1].generate_options == wanted
    config = read(folder, "tasks.math.eval_generate=true")
    assert config.tasks[1].generate_options == GenerateOptions()


def test_defaults_of_when_to_evaluate_pass_over_tasks_without_held_out_rows_unless_none_has_any(folder: Path) -> None:
    when = ["defaults.eval_steps=5", "defaults.eval_delay=2", "defaults.eval_on_start=true"]
    sql, math = read(folder, *when).tasks
    assert (sql.eval_steps, sql.eval_delay, sql.eval_on_start) == (None, None, None)
    assert (math.eval_steps, math.eval_delay, math.eval_on_start) == (5, 2, True)
    without = ["tasks.math.eval_dataset=null", "tasks.math.early_stopping=null"]
    said = r"tasks\.sql\.eval_dataset must be held-out rows, because eval_steps is set, got None"
    for own in (["tasks.sql.eval_steps=5"], [*without, "defaults.eval_steps=5"]):
        with pytest.raises(ConfigError, match=said):
            read(folder, *own)


# ------------------------------------------------------------------ faults


@pytest.mark.parametrize(
    ("old", "new", "line", "key", "meant"),
    [
        ("model:", "modle:", 1, "modle", "model"),
        ("logging_steps", "loging_steps", 3, "run.loging_steps", "logging_steps"),
        ("  learning_rate: 2e-4", "  learning_rat: 2e-4", 5, "defaults.learning_rat", "learning_rate"),
        ("    num_train_epochs", "    num_epochs", 10, "tasks.sql.num_epochs", "num_train_epochs"),
    ],
)
def test_an_unknown_key_is_named_with_its_line_and_what_was_meant(
    old: str, new: str, line: int, key: str, meant: str, folder: Path
) -> None:
    text = good(folder)
    assert old in text
    said = refusal(folder, text.replace(old, new, 1))
    assert f"tasks.yaml:{line} {key} must be a key of this section, got an unknown key" in said
    assert f'Did you mean "{meant}"?' in said


def test_faults_of_keys_values_rows_and_adapters_are_reported_in_one_go(folder: Path) -> None:
    text = """\
model: m
run: {logging_stepz: 1, save_steps: 0}
tasks:
  sql: {dataset: rows.jsonl, eval_dataset: nothere.jsonl, learning_rte: 3, seed: -1}
  math: {dataset: rows.jsonl, peft: {rr: 2}, learning_rate: fast}
  math: {dataset: rows.jsonl, max_steps: 0, early_stopping: {patienc: 3}, optim: adamw}
"""
    said = refusal(folder, text)
    assert said.startswith("9 things are wrong:"), said
    wanted = ("2 run.logging_stepz", "2 run.save_steps", "4 tasks.sql.learning_rte", "4 tasks.sql.seed")
    wanted += ("4 tasks.sql.eval_dataset", "6 tasks.math ", "6 tasks.math.max_steps", "6 tasks.math.optim")
    assert all(f"tasks.yaml:{one}" in said for one in wanted), said


@pytest.mark.parametrize(
    ("key", "value", "hint"),
    [
        ("tasks.sql.learning_rat", 1, 'Did you mean "learning_rate"'),
        ("tasks.sql.max_seq_length", 9, 'Did you mean "max_length"'),
        ("tasks.sql.bf16", "true", "set it under run."),
        ("tasks.sql.r", 3, "set r under peft."),
        ("tasks.math.early_stopping.patient", 3, 'Did you mean "patience"'),
        ("tasks.math.eval_generate.metric", "f1", 'Did you mean "metrics"'),
        ("run.fp16", "true", "Reason: each task would need its own loss scaler; use bf16"),
        ("run.evaluation_strategy", "steps", 'Did you mean "eval_strategy"'),
        ("run.padding_free", "true", "all sequences are packed"),
        ("run.shuffle", "false", "Set it on each task"),
        ("run.output_dir", "x", "It belongs at the top of the file."),
    ],
)
def test_an_unknown_key_is_refused_with_what_to_write_instead(key: str, value: Any, hint: str, folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read(folder, f"{key}={value}")
    assert f"{key} must be a key of this section, got an unknown key" in str(caught.value)
    assert hint in str(caught.value)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("learning_rate", r"--set must be key=value, such as tasks\.sql\.learning_rate=1e-4, got "),
        ("=3", r"--set must be key=value, such as"),
        ("model.name=x", r"model\.name must be an existing path, got a value where model would be a mapping"),
        ("tasks.sql.peft={r: 3", "--set"),
        ("tasks.sql=null", r"tasks\.sql must be a mapping, got None"),
        ("tasks=[sql]", r"tasks\.yaml:7 tasks must be a mapping, got \['sql'\]"),
        ("tasks=null", r"tasks\.yaml:7 tasks must be set, because every file needs it, got None"),
        (
            "tasks.math.early_stopping={patience: 0}",
            r"early_stopping\.patience must be an integer of at least 1, got 0",
        ),
        (
            "tasks.sql.peft.type=lorra",
            r"tasks\.sql\.peft\.type must be .*got \'lorra\'.*Did you mean \"lora\"",
        ),
        ("tasks.sql.dataset=null", r"tasks\.sql\.dataset must be a \.jsonl, .*, got None"),
        ("tasks.sql.dataset=tasks.yaml", r"sql\.dataset must be a file of type \.jsonl, .*, got '.*tasks\.yaml'"),
        ("tasks.sql.dataset=[rows.jsonl]", r"tasks\.sql\.dataset must be a \.jsonl, .*, got \['rows"),
        ("tasks.sql.val_size=0", r"sql\.val_size must be a number of rows of at least 1, or .*, got 0"),
        ("tasks.sql.val_size=1.5", r"sql\.val_size must be a number of rows of at least 1, or .*, got 1\.5"),
        ("tasks.sql.val_size=6", r"sql\.val_size must be a part of the rows .*, got 6 with data sets of 6 rows"),
        (
            "tasks.math.val_size=1",
            r"math\.val_size must be None with held-out rows of their own, got 1 with eval_dataset",
        ),
        (
            "tasks.sql.dataset=[{path: rows.jsonl, weight: -1}, {path: rows.jsonl, weight: 1}]",
            r"0\.weight must be .* above 0, got -1",
        ),
        ("tasks.sql.dataset=[{path: rows.jsonl, wait: 1}]", r'sql\.dataset\.0\.wait .*Did you mean "weight"'),
        (
            "tasks.sql.dataset=[{path: a, weight: 1}, {path: b}]",
            r"sql\.dataset must be data sets that all have a weight",
        ),
        ("tasks.sql.dataset=[{path: absent.jsonl}]", r"sql\.dataset\.0\.path must be .*There is no .*/absent\.jsonl"),
        ("tasks.sql.dataset=[{path: rows.jsonl}, {path: texts.jsonl}]", r"sql\.dataset must be .* the same columns"),
        ("tasks.sqll.max_steps=3", r'tasks\.sqll\.dataset must be a \.jsonl, .*, got None.*Did you mean "sql"'),
        ("tasks.a/b={dataset: rows.jsonl}", r"task\.name must be 1 to 64 letters, digits, .*, got 'a/b'"),
        ("tasks.sql.peft=lora", r"\bpeft\b"),
        ("defaults.peft=[lora]", r"defaults\.peft must be a mapping, got \['lora'\]"),
        ("model=[a]", r"model must be a string, got \['a'\]"),
    ],
)
def test_a_wrong_value_is_refused_by_key(override: str, said: str, folder: Path) -> None:
    write_rows(folder / "texts.jsonl", [{"text": "a"}])
    with pytest.raises(ConfigError, match=said):
        read(folder, override)


@pytest.mark.parametrize(
    ("text", "where", "strays"),
    [
        ("tasks:\nsql:\n  dataset: rows.jsonl\nmath: {}\n", "2 tasks", "sql, math"),
        ("run:\nbf16: true\ntasks: {sql: {dataset: rows.jsonl}}\n", "2 run", "bf16"),
        ("tasks:\n  sql:\n  dataset: rows.jsonl\n  peft: {r: 4}\n", "3 tasks.sql", "dataset, peft"),
        ("tasks:\n  sql:\n  dataset: a\n  math:\n  dataset: b\n", "3 tasks.sql", "dataset"),
    ],
)
def test_keys_that_are_not_indented_are_one_fault(text: str, where: str, strays: str, folder: Path) -> None:
    said = refusal(folder, f"model: m\n{text}")
    assert said == (
        f"tasks.yaml:{where} must be a mapping with indented keys, got nothing, followed by {strays} without more "
        "indentation. Indent these keys by two more spaces."
    )


def test_a_key_or_a_section_that_stands_twice_is_one_fault_with_its_line(folder: Path) -> None:
    text = good(folder).replace("    seed: 7\n", "    seed: 7\n    seed: 8\n")
    own = "  a: {dataset: rows.jsonl, seed: 1, peft: {r: 2}}\n"
    for written, where in ((text, "12 tasks.sql.seed"), (f"model: m\ntasks:\n{own}{own}", "4 tasks.a")):
        with pytest.raises(ConfigError, match=rf"^tasks\.yaml:{where} must be written once, got the same key twice"):
            read_config(write(folder, written))


@pytest.mark.parametrize(
    ("what", "message"),
    [("absent.yaml", r"file must be .*does not exist(.|\n)*peft-mux init"), (".", "cannot be read")],
)
def test_a_file_that_cannot_be_read_is_named(what: str, message: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(folder / what)


# ------------------------------------------------------------- secrets


def test_variables_of_the_environment_stand_where_secrets_do(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUX_TOKEN", "hf_abc")
    overrides = ["run.hub_token=${MUX_TOKEN}", "model_init_kwargs.token=${MUX_TOKEN}"]
    config = read(folder, *overrides)
    assert (config.args.hub_token, config.model_init_kwargs) == ("hf_abc", {"token": "hf_abc"})
    template = "{{ messages }} costs ${MUX_TOKEN}"
    config = read(folder, f"tasks.sql.chat_template='{template}'")
    assert config.tasks[0].chat_template == template, "a template has a language of its own"


def test_a_dollar_in_a_token_or_in_the_value_of_a_variable_is_part_of_the_secret(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUX_TOKEN", "hf_$a${MUX_SET}")
    monkeypatch.setenv("MUX_SET", "other")
    overrides = ["run.hub_token=hf_$MUX_SET$", "model_init_kwargs.token=x${MUX_TOKEN}"]
    config = read(folder, *overrides)
    assert (config.args.hub_token, config.model_init_kwargs) == ("hf_$MUX_SET$", {"token": "xhf_$a${MUX_SET}"})


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.hub_token=${MUX_TOKEN}", "got ${MUX_TOKEN}, an environment variable that is not set"),
        ("model_init_kwargs.token=${MUX_EMPTY}", "got ${MUX_EMPTY}, an environment variable that is not set"),
        ("run.hub_token=${MUX_SET}${MUX_EMPTY}${MUX_TOKEN}", "got ${MUX_EMPTY}, ${MUX_TOKEN}, an environment variable"),
        (
            "run.hub_token=$MUX_SET",
            "run.hub_token must be a token or a variable in braces, got a variable without braces",
        ),
        *(
            (given, "must be the value itself (variables may be in run.hub_token and model_init_kwargs.token only)")
            for given in ("run.run_name=${MUX_SET}", "output_dir=runs/${MUX_SET}")
        ),
    ],
)
def test_a_variable_that_is_not_set_or_stands_elsewhere_is_refused_with_its_field(
    override: str, message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MUX_TOKEN", raising=False)
    monkeypatch.setenv("MUX_EMPTY", "")
    monkeypatch.setenv("MUX_SET", "hf_abc")
    with pytest.raises(ConfigError) as refusal:
        read(folder, override)
    (fault,) = refusal.value.faults
    assert fault.where.endswith(f" {override.partition('=')[0]}")
    assert message in str(fault)
    assert "hf_abc" not in str(refusal.value)
    assert "$MUX_SET" not in str(refusal.value)


# ------------------------------------------------------------------- any text


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_config(write(folder, text))
    assert "tasks.yaml" in str(caught.value)
    return str(caught.value)


def test_aliases_are_welcome(folder: Path) -> None:
    text = "a: &lora {r: 4}\nb: *lora\nc: {<<: *lora, r: 8}\n"
    assert parse_value(text, "x") == {"a": {"r": 4}, "b": {"r": 4}, "c": {"r": 8}}
    merged = GOOD.replace("peft: {{r: 64}}", "peft: {{<<: *own, r: 8}}").replace(
        "    seed: 7\n", "    seed: 7\n    peft: &own {{r: 4, lora_alpha: 5}}\n"
    )
    _, math = read_config(write(folder, merged.format(output_dir=folder / "out"))).tasks
    assert (math.peft_config.r, math.peft_config.lora_alpha) == (8, 5)


def test_aliases_that_stand_for_billions_of_values_are_refused() -> None:
    lines = ["a0: &a0 {x: 1}", *(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 12))]
    with pytest.raises(ConfigError, match=r"^--set run must have at most 200,000 values once aliases"):
        parse_value("\n".join(lines), "--set run")


# ------------------------------------------------------------------------- contents


@pytest.mark.parametrize(
    ("key", "meant"),
    [("yes", "true or false"), ("on", "true or false"), ("null", "nothing"), ("~", "nothing"), ("1", "a number")],
)
def test_a_key_that_yaml_reads_as_another_value_shall_be_quoted(tmp_path: Path, key: str, meant: str) -> None:
    message = refusal(tmp_path, f"model: m\ntasks:\n  {key}: {{dataset: rows.jsonl}}\n")
    assert f"tasks.yaml:3 tasks.{key} must be a name, got a key that YAML reads as {meant}" in message
    assert f'Write it in quotes: "{key}".' in message


def test_a_quoted_key_is_a_name(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    top = "model: m\noutput_dir: out\nrun: {use_cpu: true}\nmodel_init_kwargs: {max_memory: {0: 1GiB}}\n"
    tasks = 'tasks:\n  "yes": {dataset: rows.jsonl}\n  "1": {dataset: rows.jsonl}\n'
    config = read_config(write(tmp_path, top + tasks))
    assert [task.name for task in config.tasks] == ["yes", "1"]
    assert config.model_init_kwargs == {"max_memory": {0: "1GiB"}}


@pytest.mark.parametrize(
    "text",
    [
        *("- a\n- b\n", "a: [1\n", "a: b: c\n", "when: 2024-13-45\n", "number: !!int x\n", "flag: !!bool maybe\n"),
        *("a: *unknown\n", "a: &x 1\nb: &x 2\n", "--- a\n--- b\n", "%YAML 9.9\n---\na: 1\n", "# only a comment\n"),
    ],
)
def test_what_cannot_be_read_is_refused_by_file(tmp_path: Path, text: str) -> None:
    assert "tasks.yaml" in refusal(tmp_path, text)


# ---------------------------------------------------------------------- files of rows


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv"])
def test_rows_that_are_not_utf_8_are_refused_by_file_line_and_remedy(tmp_path: Path, name: str, shell: Shell) -> None:
    header = "text\n" if name.endswith("csv") else ""
    row = "caf\xe9\n" if name.endswith("csv") else '{"text": "caf\xe9"}\n'
    plain = "ok\n" if name.endswith("csv") else '{"text": "ok"}\n'
    (tmp_path / name).write_bytes((header + plain + row).encode("latin1"))
    line = 3 if header else 2
    text = f"model: m\nrun: {{use_cpu: true}}\ntasks:\n  own: {{dataset: {name}, max_steps: 1}}\n"
    message = shell.refused("train", write(tmp_path, text))
    assert f"tasks.yaml:4 tasks.own.dataset must be UTF-8 text, got {name} line {line}, byte 0xe9." in message
    assert f"iconv -f latin1 -t utf-8 {name}" in message
