"""The five notebooks are stored as they should be, and run from their first cell to their last without network."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.examples.notebook_run import executed, html_of, num_cells_without_outputs, outputs_of, printed_by
from tests.paths import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = ["01_first_run", "02_your_own_data", "03_twenty_adapters", "04_live", "05_many_processes"]


def run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("matplotlib", reason="needs the plots extra: notebooks draw")
    return executed(ROOT / "notebooks" / f"{name}.ipynb", folder, monkeypatch)


def sources(path: Path) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]


def test_there_are_five_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == NAMES


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_a_notebook_is_short_cells_of_prose_and_code_without_outputs(path: Path) -> None:
    num_code, cells = num_cells_without_outputs(path), sources(path)
    assert 20 <= len(cells) <= 40
    assert 10 <= num_code <= len(cells) * 2 / 3, "prose and code are mixed"
    assert [cell for cell in cells if len(cell.splitlines()) > 30] == []
    assert cells[0].startswith("# "), "the first cell says what there is to see"
    assert cells[-1].startswith("## Next")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_what_a_notebook_points_to_is_there(path: Path) -> None:
    links = re.findall(r"\]\(([^)]+)\)", "\n".join(sources(path)))
    assert len(links) >= 1
    assert [link for link in links if not (path.parent / link).is_file()] == []


# The quickstart trains the same tasks in the fast tests.
@pytest.mark.slow
@pytest.mark.notebook
def test_the_first_run_teaches_three_tasks_as_each_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = run("01_first_run", tmp_path, monkeypatch)
    printed, (shown,) = printed_by(notebook), html_of(notebook, "output = trainer.train()")
    assert any("image/png" in output.get("data", {}) for output in outputs_of(notebook)), "the losses are not drawn"
    assert "peft-mux" in shown
    assert len(re.findall(r"<svg", shown)) == 3, "one output, with a chart of each task"
    assert shown.count(">succeeded<") == 3
    assert 'Did you mean "adamw_torch"' in printed
    for name in ("mood", "kind", "action"):
        assert f"run/{name}/adapter_model.safetensors" in printed
        assert re.search(rf"^{name} +right answers +\d+% -> +(9\d|100)%$", printed, flags=re.MULTILINE), name
        assert len(re.findall(rf"^{name} +' \w+'$", printed, flags=re.MULTILINE)) == 2, "they answer together"
    assert float(re.findall(r"difference of a weight matrix: (\S+)", printed)[0]) < 1e-4


@pytest.mark.slow
@pytest.mark.notebook
def test_your_own_data_shows_what_carries_loss_and_what_is_said_of_mistakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = run("02_your_own_data", tmp_path, monkeypatch)
    printed = printed_by(notebook)
    assert "sums, prompt_completion: zero and zero make[ zero<|end|>]" in printed
    assert "asked, prompt_completion: zero and zero make[ zero<|end|>]" in printed
    assert "chat, messages: user: Is 0 even?\n[yes<|end|>]" in printed, "the assistant alone carries loss"
    assert "### Response:\n[zero<|end|>]" in printed
    assert "cut 100.0%" in printed
    assert printed.count("8 held-out rows are trained on as well") == 1, "and no more once that is mended"
    for message in (
        'got columns question, answer; allowed: .* row_format={"prompt": "question", "completion": "answer"}',
        "the tokenizer has no chat template",
        r"has no \{% generation %\} block",
        "none can be trained on .*Raise max_length",
        r"row 40 column completion: got None",
        "row 40 column completion: got no such column",
        r"row 40 column completion: got 3 \(int\); allowed: a string. Of a CSV file: .*cast_column",
        "got columns prompt, completion; allowed: conversations",
        r"sum.csv', which is not there",
        "got an empty dataset",
    ):
        assert re.search(message, printed), message
    trained = re.findall(r"^(\w+): succeeded$", printed, flags=re.MULTILINE)
    assert trained == ["text", "sums", "alpaca", "shared", "asked"]


@pytest.mark.slow
@pytest.mark.notebook
def test_twenty_adapters_are_ranked_and_the_winner_is_as_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = run("03_twenty_adapters", tmp_path, monkeypatch)
    printed, shown = printed_by(notebook), html_of(notebook)
    assert any("peft-mux" in one for one in shown), "the run as it went on"
    assert any(one.count("<tr>") == 21 for one in shown), "the ranking"
    assert any("image/png" in output.get("data", {}) for output in outputs_of(notebook))
    assert 'Did you mean "peft_config.r"?' in printed
    ended, taken, asked = map(int, re.findall(r"(\d+) of 20 ended early; (\d+) of (\d+) steps", printed)[0])
    assert (ended, asked) == (19, 20 * 64)
    assert taken < asked / 4
    one, twenty = (float(value) for value in re.findall(r"tasks: ([\d.]+) MiB", printed))
    assert one < twenty < 20 * one, "one model for all"
    assert re.search(r"with the adapter: +(8\d|9\d|100)%", printed)
    assert float(re.findall(r"difference of a weight matrix: (\S+)", printed)[0]) < 1e-4


@pytest.mark.slow
@pytest.mark.notebook
def test_a_live_run_is_watched_paused_extended_interrupted_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = run("04_live", tmp_path, monkeypatch)
    printed = printed_by(notebook)
    assert re.search(r"^mood: paused\s+^task +status", printed, flags=re.MULTILINE), "two commands of a terminal"
    assert re.search(r"^mood +paused +\d+/1000000", printed, flags=re.MULTILINE)
    assert "non_finite: loss is nan at step 1" in printed
    for name, status in (("action", "succeeded"), ("yes-or-no", "failed"), ("mood", "removed"), ("kind", "removed")):
        assert re.search(rf"^{name} +{status} ", printed, flags=re.MULTILINE), name
    assert "added: kind" in printed
    assert "mood: removed\nkind: removed" in printed.replace("\r", "")
    assert "'mood': 'succeeded at step 30', 'kind': 'succeeded at step 30', 'action': 'succeeded at step 20'" in printed
    assert "interrupted by signal 2, mood at step 12" in printed
    (reloaded,) = html_of(notebook, "trainer.show()", "tasks)")
    assert "mood" in reloaded
    assert "12/30" in reloaded
    assert "'mood': 'succeeded at step 40', 'kind': 'succeeded at step 20', 'action': 'succeeded at step 15'" in printed
    assert float(re.findall(r"difference of a weight matrix: (\S+)", printed)[0]) < 1e-4


@pytest.mark.slow
@pytest.mark.notebook
@pytest.mark.distributed
def test_many_processes_train_what_one_would_and_are_planned_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notebook = run("05_many_processes", tmp_path, monkeypatch)
    printed = printed_by(notebook)
    assert [int(rank) for rank in re.findall(r"^rank (\d): [\d,]+ tokens", printed, re.MULTILINE)] == [0, 1]
    for name in ("mood", "kind"):
        assert re.search(rf"^{name}: (1[5-9]|20) of 20 held-out answers begin right$", printed, re.MULTILINE)
        assert len(list(tmp_path.glob(f"many-processes-*/run/{name}/adapter_model.safetensors"))) == 1
        assert float(re.findall(rf"^{name}: largest .* (\S+)$", printed, re.MULTILINE)[0]) < 1e-3
    assert re.search(r"^stage 1 \|[.A-Za-z]+\|$", printed, re.MULTILINE), "the time line"
    assert any("image/png" in output.get("data", {}) for output in outputs_of(notebook))
    assert re.search(r"^plan  6 tasks on 2 x A100-80GB, \d hTasks, 2 stages", printed, re.MULTILINE)
    rates = re.findall(r"^(\d) stages of (\d): +[\d,]+ tokens/s predicted", printed, re.MULTILINE)
    assert rates == [("4", "1"), ("2", "2"), ("1", "4")]
    assert re.search(r"replicas='<\d,\d>", printed)
