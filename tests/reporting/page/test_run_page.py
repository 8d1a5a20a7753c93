"""`report.html` and the pictures that a run leaves: whole, by themselves, and of what was measured."""

from __future__ import annotations

import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html import unescape
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from peft_mux import MultiTaskTrainer
from peft_mux.errors import ConfigError
from peft_mux.reporting import page
from peft_mux.reporting import reporter as run_files
from peft_mux.reporting.screen import Progress
from peft_mux.reporting.views import TaskView
from peft_mux.scheduler.plan_views import simulated_step
from peft_mux.scheduler.units import bytes_text
from tests.engine.losses.cases import pairs
from tests.invariants.mux_lab import rows, small_task
from tests.runs import raising, task_of, trainer_of

SECTIONS = [
    "Tasks",
    "Losses",
    "Metrics",
    "A step, planned and measured",
    "Memory, planned and measured",
    "Versions and devices",
]


def trained(folder: Path, **options: Any) -> MultiTaskTrainer:
    given = {"logging_steps": 2, "max_tokens_per_micro_batch": 48, **options}
    # Eight steps of both, then twelve of the second one alone.
    held_out = {"eval_dataset": rows(9, 4, 5, 9), "eval_steps": 3}
    tasks = [small_task("a", data_seed=1, **held_out), small_task("b", data_seed=2, max_steps=20)]
    trainer = trainer_of(folder, tasks, **given)
    trainer.train()
    return trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[MultiTaskTrainer, Path]:
    folder = tmp_path_factory.mktemp("page") / "run"
    return trained(folder), folder


def test_the_page_needs_nothing_next_to_itself(run: tuple[MultiTaskTrainer, Path]) -> None:
    page = (run[1] / "report.html").read_text(encoding="utf-8")
    assert re.findall("<h2>(.*?)</h2>", page) == [*SECTIONS, "Configuration"]
    assert not re.search(r"https?:|<script|<link|<img|@import|url\(", page)
    assert "color-scheme:light dark" in page
    assert 'fill="black"' not in page


def test_the_page_has_the_report_and_a_curve_of_each_task(run: tuple[MultiTaskTrainer, Path]) -> None:
    trainer, folder = run
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.count(f">{folder / 'b'}</td>") == 1
    drawings = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page)]
    curves = [[part for part in svg.iter() if part.tag == "polyline"] for svg in drawings]
    dashed = [sum(bool(part.get("stroke-dasharray")) for part in own) for own in curves]
    assert dashed[:3] == [1, 1, 0], "held-out losses: in the drawing of the run, of a, of b"
    lines = [[part.get("points").split() for part in own if not part.get("stroke-dasharray")] for own in curves]
    logged = [len([one for one in trainer.task_states[name].log_history if "loss" in one]) for name in "ab"]
    of_run, of_a, of_b = ([len(line) for line in own] for own in lines[:3])
    assert of_run == logged
    assert [of_a[0], of_b[0]] == logged


def test_the_measured_step_is_one_of_all_tasks(run: tuple[MultiTaskTrainer, Path]) -> None:
    trainer, folder = run
    page = (folder / "report.html").read_text(encoding="utf-8")
    drawing = next(svg for svg in re.findall(r"<svg.*?</svg>", page) if ">measured<" in svg)
    followed = trainer._run.log.times.followed
    assert followed is not None
    plan, times = followed
    assert plan is not None
    assert {share.name for share in plan.shares} == {"a", "b"}
    words = [title.text for title in ElementTree.fromstring(drawing).iter() if title.tag == "title"]
    spans, passes = len(simulated_step(plan).spans), len(times.passes)
    assert passes > 1, "the case is too easy"
    assert len(words) == spans + passes
    assert {word.split(":")[0] for word in words[spans:]} <= {"a", "b", "a, b", "b, a"}


def test_the_measured_memory_is_of_the_kind_that_was_planned(run: tuple[MultiTaskTrainer, Path]) -> None:
    trainer, folder = run
    (record,) = trainer._reporter.records
    weights = sum(own.nbytes for own in trainer.model.parameters())
    assert weights <= record.tensor_bytes < record.peak_bytes / 2, "not that of Python and its libraries"
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert f">process 0: {bytes_text(record.tensor_bytes)}<" in page


def test_losses_of_each_kind_have_a_drawing_and_all_metrics_are_on_the_page_in_the_log_and_in_the_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Progress, "shows_losses", True)  # as in the live table
    held_out = {"eval_dataset": rows(9, 4, 5, 9), "eval_steps": 2, "compute_metrics": lambda _: {"f1": 0.25}}
    tasks = [small_task("sql", data_seed=1, **held_out), task_of("prefs", pairs(3, 8), objective="dpo")]
    trainer_of(tmp_path, tasks, logging_steps=4).train()
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    titles = [ElementTree.fromstring(svg)[0].text for svg in re.findall(r"<svg.*?</svg>", page)]
    assert titles[:4] == ["Loss of all dpo tasks", "Loss of all sft tasks", "sql", "prefs"]
    assert {"grad_norm", "learning_rate", "perplexity", "f1", "rewards/margins"} <= set(titles[4:])
    assert "<td>f1</td><td>sql</td><td>-</td><td>0.25</td>" in page
    assert page.count("<th>metric</th>") == 1
    printed = capsys.readouterr().out
    assert re.search(r"^prefs step 4  rewards/chosen .*  rewards/margins [-\d.]+", printed, re.MULTILINE)
    assert re.findall(r"^sql step 2 .*", printed, re.MULTILINE) == ["sql step 2  eval_f1 0.2500"]
    cards = {name: (tmp_path / name / "README.md").read_text(encoding="utf-8") for name in ("sql", "prefs")}
    assert "| eval_f1 | 0.25 |" in cards["sql"]
    assert "| rewards/margins of training rows, last logged |" in cards["prefs"]
    assert "grad_norm of" not in cards["prefs"]


def test_every_setting_of_the_run_and_its_tasks_is_on_the_page(run: tuple[MultiTaskTrainer, Path]) -> None:
    page = (run[1] / "report.html").read_text(encoding="utf-8")
    sections = re.findall("<details><summary>([^<]*)</summary><pre>(.*?)</pre>", page, re.DOTALL)
    assert [name for name, _ in sections] == ["arguments of the run", "task a", "task b"]
    settings = [json.loads(unescape(text)) for _, text in sections]
    assert settings[0]["max_tokens_per_micro_batch"] == 48
    assert (settings[2]["num_steps"], settings[2]["peft_config"]["r"]) == (20, 4)
    assert "torch</td>" in page


@pytest.mark.parametrize("num_tasks", [1, 7])
def test_a_picture_has_titles_names_of_its_axes_and_one_legend_that_covers_nothing(
    num_tasks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure_type = pytest.importorskip("matplotlib.figure", reason="needs the plots extra").Figure
    saved: list[Any] = []
    monkeypatch.setattr(figure_type, "savefig", lambda figure, *args, **options: saved.append(figure))
    curve = ((1, 3.0), (9, 1.0))
    tasks = [TaskView(f"task {number}", "running", 9, 9, losses=curve) for number in range(num_tasks)]
    page.draw_losses([replace(tasks[0], eval_losses=((4, 2.5), (8, 1.5)), settings="lr=2e-4 r=8"), *tasks[1:]])
    (figure,) = saved
    figure.canvas.draw()
    panels = figure.axes
    assert figure._suptitle.get_text() == "Loss of each task"
    assert [(one.get_title(), one.get_xlabel(), one.get_ylabel()) for one in panels] == [
        (task.name if number else "task 0\nlr=2e-4 r=8", "step", "loss") for number, task in enumerate(tasks)
    ]
    assert [[line.get_linestyle() for line in one.lines] for one in panels] == [["-", "--"], *[["-"]] * (num_tasks - 1)]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["train: training rows", "eval: held-out rows"]
    boxes = [one.get_tightbbox() for one in panels]
    assert not any(legend.get_window_extent().overlaps(box) for box in boxes)
    assert not any(first.overlaps(second) for first, second in combinations(boxes, 2)), "no title lies on a number"


def test_a_page_that_cannot_be_written_costs_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_files, "write_file", raising(OSError(28, "No space left on device")))
    trainer = trained(tmp_path / "run")
    assert set(trainer.task_statuses.values()) == {"succeeded"}
    assert "report.html: could not be written" in capsys.readouterr().out


def test_without_matplotlib_a_run_leaves_its_page_and_says_how_to_get_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    trainer = trained(tmp_path / "run")
    assert set(trainer.task_statuses.values()) == {"succeeded"}
    assert (tmp_path / "run" / "report.html").is_file()
    assert not list((tmp_path / "run").rglob("*.png"))
    with pytest.raises(ConfigError, match=r"plots need matplotlib: pip install matplotlib"):
        trainer.plot_losses()
