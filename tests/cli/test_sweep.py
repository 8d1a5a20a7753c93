"""`peft-mux train --sweep`: tasks of a file, each with many settings, and tasks that are not swept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.lab import write_rows
from tests.invariants.mux_lab import rows, tiny_llama
from tests.shell import Shell


@pytest.fixture
def file(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path / "backbone")
    for seed, name in enumerate(("train", "eval")):
        write_rows(tmp_path / f"{name}.jsonl", rows(seed, 8, 5, 9))
    path = tmp_path / "tasks.yaml"
    path.write_text(
        "model: backbone\n"
        f"output_dir: {tmp_path / 'out'}\n"
        "run: {use_cpu: true, report_to: none}\n"
        "defaults: {dataset: train.jsonl, eval_dataset: eval.jsonl, train_batch_size: 4, max_steps: 4}\n"
        "tasks:\n"
        "  sql: {peft: {r: 2, target_modules: [q_proj]}}\n"
        "  math: {peft: {r: 4, target_modules: [v_proj]}, max_steps: 2}\n",
        encoding="utf-8",
    )
    return path


def test_a_task_is_trained_with_all_combinations_next_to_one_that_is_not_swept(
    file: Path, tmp_path: Path, shell: Shell
) -> None:
    grid = ["--sweep", "tasks.sql.learning_rate=1e-3,1e-2", "--sweep", "tasks.sql.peft.r=1,2"]
    printed = shell("train", file, *grid, "--early-stop", "halving")
    ranking = printed[printed.index("sweep sql\n") :].splitlines()
    assert ranking[1].split() == ["task", "learning_rate", "peft_config.r", "eval_loss", "step", "status"]
    assert len([line for line in ranking if line[:1].isdigit()]) == 4
    assert printed.count("sweep sql\n") == 1
    paths = tmp_path.glob("out/*/adapter_config.json")
    configs = {path.parent.name: json.loads(path.read_text("utf-8")) for path in paths}
    assert sorted(configs) == ["math", "sql", "sql-01", "sql-02", "sql-03", "sql-04"]
    assert [configs[f"sql-0{number}"]["r"] for number in (1, 2, 3, 4)] == [1, 2, 1, 2]


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("learning_rate=1e-3,1e-2", "error: --sweep must be tasks.NAME.FIELD=VALUE,VALUE, got"),
        ("tasks.sqll.learning_rate=1,2", 'Did you mean "sql"?'),
        ("tasks.sql.learning_rat=1,2", 'Did you mean "learning_rate"?'),
        ("tasks.sql.peft.rr=1,2", "sweep.peft_config.rr"),
        ("tasks.sql.learning_rate=1", "error: sweep must have 2 to 512 combinations, got 1"),
    ],
)
def test_what_cannot_be_swept_ends_with_2(option: str, said: str, file: Path, shell: Shell) -> None:
    assert said in shell.refused("train", file, "--sweep", option)


def test_a_rule_for_sweeps_without_a_sweep_ends_with_2(file: Path, shell: Shell) -> None:
    assert "--early-stop needs --sweep" in shell.refused("train", file, "--early-stop", "halving")
