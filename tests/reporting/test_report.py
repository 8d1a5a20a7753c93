"""The banner with which a run begins and the table with which it ends, in a whole run."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import OlmoeConfig, OlmoeForCausalLM

from peft_mux import EarlyStopping, MultiTaskTrainer
from peft_mux.log.recorders import RunTimes
from peft_mux.reporting.run_report import ReportRow, RunReport, next_lines
from tests import runs
from tests.invariants.mux_lab import rows, small_task
from tests.reporting.lab import Clock
from tests.runs import Acts, small_tasks, stop

HELD_OUT = rows(9, 4, 5, 9)


def trainer_of(folder: Path, tasks: list[Any], **options: Any) -> MultiTaskTrainer:
    return runs.trainer_of(folder, tasks, **{"logging_steps": 2, **options})


def line_of(report: str, name: str) -> list[str]:
    (line,) = [line for line in report.splitlines() if line.startswith(f"{name} ")]
    return line.split()


def test_a_run_begins_with_eight_lines_and_ends_with_its_report_of_times_shares_losses_and_what_to_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, steps = tmp_path / "run", {"a": 2, "b": 6, "c": 6}
    tasks = [small_task(name, data_seed=1, max_steps=own, rank=8 if name == "b" else 4) for name, own in steps.items()]
    trainer = trainer_of(root, tasks)
    trainer.train()
    printed, report = capsys.readouterr().out.splitlines(), trainer.report()
    words = [line.split()[0] for line in printed[:8]]
    assert words == ["peft_mux", "device", "model", "tasks", "kernels", "plan", "memory", "output"]
    assert "24,800 parameters, float32" in printed[2]
    assert "3, rank 4 to 8, 14.175 to 24.83 % trainable each, 30 rows, 2 to 6 steps" in printed[3]
    assert "torch, not Triton: there are none for cpu" in printed[4]
    assert re.fullmatch(r"plan     1 pass a step, .* \(order of magnitude\), predicted", printed[5])
    assert max(map(len, printed[:7])) <= 110
    assert str(report) in "\n".join(printed)

    losses = [entry["loss"] for entry in trainer.task_states["b"].log_history if "loss" in entry]
    name, status, taken, loss, word, best, held_out, time, share, tokens, place = line_of(report, "b")
    assert word == "train", "of training rows, as it is not evaluated"
    assert (name, status, taken, held_out, place) == ("b", "succeeded", "6/6", "-", str(root / "b"))
    assert float(loss) == pytest.approx(trainer.table["b"].last_loss, abs=1e-4)
    assert float(best) == pytest.approx(min(trainer.table["b"].last_loss, *losses), abs=1e-4)
    assert re.fullmatch(r"\d+:\d\d", time)
    assert tokens == f"{trainer.table['b'].num_tokens:,}"
    assert "in turn" not in report, "a profile that was not measured says nothing about a gain"
    assert f"peft-mux export {root} --vllm" in report
    assert f"""PeftModel.from_pretrained(backbone, "{root / "a"}")""" in report
    copy = pickle.loads(pickle.dumps(report))
    assert copy == report
    assert copy._repr_html_().count("<tr>") == 4

    trainer.remove_task("c").result()
    report = trainer.report()
    words = line_of(report, "c")
    assert (words[1:3], words[-1]) == (["removed", "6/6"], str(root / "c"))
    assert "time  of time  tokens" in report.splitlines()[0]
    shares = {row.name: row.time_share or 0.0 for row in report.rows}
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["a"] < min(shares["b"], shares["c"])
    assert line_of(report, "b")[8] == share == f"{shares['b']:.0%}"
    assert f">{shares['c']:.0%}</td>" in report._repr_html_()


@pytest.mark.parametrize(
    ("own", "coefficient", "said"),
    [(0.01, 0.3, "router_aux_loss_coef 0.3"), (0.01, 0.0, "routers without a balancing loss")],
)
def test_the_banner_says_with_which_coefficient_routers_are_balanced(
    own: float, coefficient: float | None, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 97}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
    config = OlmoeConfig(**shape, pad_token_id=0, router_aux_loss_coef=own)
    settings = {"target_modules": ["q_proj"], "router_aux_loss_coef": coefficient}
    task = small_task("a", data_seed=1, max_steps=1, **settings)
    trainer_of(tmp_path, [task], model=OlmoeForCausalLM(config)).train()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("model ")]
    assert line.endswith(f"float32, {said}")


def test_with_a_measured_profile_the_report_says_what_the_steps_would_have_taken_in_turn(tmp_path: Path) -> None:
    tasks = small_tasks("a", "b", max_steps=6)
    profile, path = trainer_of(tmp_path / "described", tasks).measure_profile(budget_s=0.2), tmp_path / "profile.json"
    path.write_text(profile.to_json(), encoding="utf-8")
    trainer = trainer_of(tmp_path / "run", tasks, cost_profile=str(path))
    trainer.train()
    assert re.search(
        r"steps together [\d.]+ s, measured; in turn [\d.]+ s, predicted \(measured profile, times [\d.]+\): [\d.]+x",
        trainer.report(),
    )


def test_of_a_task_that_went_back_to_its_best_adapter_the_held_out_loss_of_that_is_reported(tmp_path: Path) -> None:
    evaluated = {"eval_dataset": HELD_OUT, "eval_steps": 1, "early_stopping": EarlyStopping(patience=2)}
    task = small_task("a", data_seed=1, max_steps=40, learning_rate=0.3, **evaluated)
    trainer = trainer_of(tmp_path / "run", [task])
    trainer.train()
    found = [entry["eval_loss"] for entry in trainer.task_states["a"].log_history if "eval_loss" in entry]
    assert min(found) < found[-1], "the case is too easy"
    word, best, held_out = line_of(trainer.report(), "a")[4:7]
    assert (word, best) == ("eval", held_out)
    assert float(best) == pytest.approx(min(found), abs=1e-4)


def test_the_best_value_is_that_of_the_metric_that_decides_or_of_the_held_out_loss(tmp_path: Path) -> None:
    given = {"data_seed": 1, "max_steps": 4, "eval_dataset": HELD_OUT, "eval_steps": 1, "learning_rate": 0.3}
    scores = iter([0.1, 0.4, 0.3, 0.2])
    by_score = {"compute_metrics": lambda prediction: {"score": next(scores)}, "metric_for_best_model": "score"}
    tasks = [small_task("by-loss", **given), small_task("by-score", **given, **by_score)]
    trainer = trainer_of(tmp_path / "run", tasks)
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.task_states["by-loss"].log_history if "eval_loss" in entry]
    by_name = {row.name: row for row in trainer.report().rows}
    assert (by_name["by-loss"].best, by_name["by-loss"].best_metric) == (min(losses), "eval_loss")
    assert (by_name["by-score"].best, by_name["by-score"].best_metric) == (0.4, "eval_score")
    assert line_of(trainer.report(), "by-score")[4:6] == ["score", "0.4000"]
    assert ">score 0.4000</td>" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def test_a_run_that_was_interrupted_is_shown_as_such_and_recorded_as_it_continues(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path / "run", [small_task("a", data_seed=1, max_steps=2), small_task("b", data_seed=2)])
    trainer.add_callback(Acts(lambda **_: stop(trainer), step=2))
    trainer.train()
    report = trainer.report()
    assert line_of(report, "a")[1] == "succeeded"
    assert line_of(report, "b")[1] == "interrupted"
    assert "interrupted" in line_of(report.fitted(60), "b")
    assert "interrupted" in pickle.loads(pickle.dumps(report))._repr_html_()
    assert [row.status for row in report.rows] == ["succeeded", "running"]
    page = (tmp_path / "run/report.html").read_text(encoding="utf-8")
    assert "2 tasks (1 succeeded, 1 interrupted)" in page
    assert "train(resume_from_checkpoint=True)" in report


def test_with_many_tasks_a_line_of_losses_has_the_mean_the_least_and_the_greatest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = [small_task(f"t{number}", data_seed=number, max_steps=2) for number in range(13)]
    trainer_of(tmp_path, tasks, save_strategy="no").train()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step 2")]
    assert re.fullmatch(r"step 2  13 tasks, mean [\d.]+, from t\d+ [\d.]+ to t\d+ [\d.]+", line)


def shown_row(name: str, folder: Path | None, reason: str = "") -> ReportRow:
    status = "failed" if reason else "succeeded"
    return ReportRow(
        name, status, reason, 60, 60, 0.96751, 0.81159, "eval_loss", 1.00554, 19.0, 5_930, folder and folder / name
    )


def test_in_a_window_of_80_characters_the_report_has_whole_numbers_and_commands_that_can_be_pasted() -> None:
    root = Path("/data/runs/support")
    names = ["sql", "summaries_of_long_legal_documents_v1", "summaries_of_long_legal_documents_v2"]
    rows = [shown_row(name, root) for name in names] + [shown_row("lost", None, "a callback failed: " + "why " * 30)]
    notes = [
        "speed  steps together 7.2 s, measured; " + "in turn 8.9 s " * 6,
        *next_lines(root, rows, root / "report.html"),
    ]
    lines = RunReport(rows, notes=notes).fitted(80).splitlines()
    assert lines[:7] == [
        "task                 status     steps    loss         best    eval  time  tokens",
        "sql                  succeeded  60/60  0.9675  eval 0.8116  1.0055  0:19   5,930",
        "summaries…uments_v1  succeeded  60/60  0.9675  eval 0.8116  1.0055  0:19   5,930",
        "summaries…uments_v2  succeeded  60/60  0.9675  eval 0.8116  1.0055  0:19   5,930",
        "lost                 failed     60/60  0.9675  eval 0.8116  1.0055  0:19   5,930",
        "adapters are in /data/runs/support/TASK",
        "not saved: lost",
    ]
    assert max(map(len, lines)) <= 80
    assert "lost: a callback failed: why why" in lines[7]
    first = lines.index("next   # serve all adapters")
    assert lines[first + 1 : first + 4] == [
        "       peft-mux export /data/runs/support --vllm",
        "       # merge one into the backbone",
        "       peft-mux export /data/runs/support --merge sql --output merged",
    ]


def test_a_narrow_window_has_fewer_columns() -> None:
    text = RunReport([shown_row("sql", Path("/runs")), shown_row("qa", Path("/runs"))]).fitted(50)
    assert text.splitlines()[0].split() == ["task", "status", "steps", "loss", "best"]
    assert max(map(len, text.splitlines())) <= 50


def test_a_reason_moves_no_cursor_and_begins_no_line() -> None:
    report = RunReport([shown_row("lost", None, "\x1b[2Jgone\nsql: succeeded")])
    assert "lost: \\x1b[2Jgone\n  sql: succeeded" in report
    assert "\x1b" not in report.fitted(40)


def test_a_program_of_the_users_own_is_shown_how_paused_tasks_continue(tmp_path: Path) -> None:
    rows = [shown_row("a", tmp_path)._replace(status="paused")]
    lines = next_lines(tmp_path, rows, None)
    assert lines[0].startswith("next   # run this first")
    assert [line.strip() for line in lines[1:4:2]] == [
        f"peft-mux resume {tmp_path} a --next",
        "trainer.train(resume_from_checkpoint=True)",
    ]


def test_lines_of_losses_say_how_fast_it_goes_and_for_how_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = small_task("a", data_seed=1, max_steps=6, eval_dataset=HELD_OUT, eval_steps=4)
    trainer_of(tmp_path, [task], save_strategy="no").train()
    printed = capsys.readouterr().out
    first, second, last = re.findall(r"^step \d  .*$", printed, re.MULTILINE)
    assert re.fullmatch(r"step 2  a [\d.]+", first)
    assert re.fullmatch(r"step 4  a [\d.]+  \([\d,.k]+ tokens/s, \d+:\d\d left\)", second)
    assert re.fullmatch(r"step 6  a [\d.]+", last), "nothing is left"
    assert re.search(r"^a step 4  eval_loss [\d.]+  eval_perplexity [\d.]+$", printed, re.MULTILINE)


def test_the_time_of_a_step_of_several_tasks_is_divided_by_their_tokens() -> None:
    times = RunTimes(clock := Clock())
    a, b = (SimpleNamespace(name=name, step=0, num_tokens=1000) for name in "ab")
    times.begin([a, b])  # type: ignore[list-item]
    assert times.share("a") is None, "no step was taken"
    for seconds, trained in ((4.0, {"a": 300, "b": 100}), (6.0, {"b": 7})):
        clock.now_s += seconds
        for one in (a, b):
            one.step += one.name in trained
            one.num_tokens += trained.get(one.name, 0)
        times.advance([a, b])  # type: ignore[list-item]
    assert (times.share("a"), times.share("b"), times.share("c")) == (0.3, 0.7, 0.0)
    assert (times.seconds("a"), times.seconds("b")) == (4.0, 10.0), "of these every task has all"
