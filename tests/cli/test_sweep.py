"""`peft-mux train --sweep`: tasks of a file, each with many settings, and tasks that are not swept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peft_mux.cli.main import main
from tests.invariants.mux_lab import rows, tiny_llama


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    tiny_llama().save_pretrained(tmp_path / "backbone")
    for seed, name in enumerate(("train", "eval")):
        lines = "".join(json.dumps(row) + "\n" for row in rows(seed, 8, 5, 9))
        (tmp_path / f"{name}.jsonl").write_text(lines, encoding="utf-8")
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
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = ["--sweep", "tasks.sql.learning_rate=1e-3,1e-2", "--sweep", "tasks.sql.peft.r=1,2"]
    assert main(["train", str(file), *grid, "--early-stop", "halving"]) == 0
    printed = capsys.readouterr().out
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
def test_what_cannot_be_swept_ends_with_2(
    option: str, said: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(file), "--sweep", option]) == 2
    assert said in capsys.readouterr().err


def test_a_rule_for_sweeps_without_a_sweep_ends_with_2(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(file), "--early-stop", "halving"]) == 2
    assert "--early-stop needs --sweep" in capsys.readouterr().err
