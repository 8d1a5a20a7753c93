"""The five notebooks are stored with outputs that hold what their text says, and run without network."""

from __future__ import annotations

import json
import re
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.examples.notebook_run import has_picture, html_of, outputs_of, printed_by, run, stored
from tests.paths import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = ["01_first_run", "02_your_own_data", "03_twenty_adapters", "04_live", "05_many_processes"]


def sources(path: Path) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]]


def test_there_are_five_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == NAMES


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_a_notebook_is_short_cells_that_first_install_the_package_and_links_that_are_there(path: Path) -> None:
    cells = sources(path)
    code = [cell for cell in stored(path.stem).cells if cell.cell_type == "code"]
    assert 20 <= len(cells) <= 40
    assert 10 <= len(code) <= len(cells) * 2 / 3, "prose and code are mixed"
    assert [cell for cell in cells if len(cell.splitlines()) > 30] == []
    assert cells[0].startswith("# "), "the first cell says what there is to see"
    assert cells[-1].startswith("## Next")
    assert 'if importlib.util.find_spec("peft_mux") is None:\n    %pip install' in code[0].source
    assert '"..[plots]"' in code[0].source, "from this checkout: no index has the package"
    assert code[0].outputs == []
    links = re.findall(r"\]\(([^)]+)\)", "\n".join(cells))
    assert len(links) >= 1
    assert [link for link in links if not (path.parent / link).is_file()] == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=NAMES)
def test_a_notebook_is_stored_with_outputs_of_its_present_cells_and_nothing_of_the_machine(path: Path) -> None:
    pytest.importorskip("nbclient", reason="needs the notebooks extra: nbclient")
    from tools.notebooks import sources_hash

    notebook = stored(path.stem)
    assert notebook.metadata.peft_mux.sources == sources_hash(notebook), f"run python -m tools.notebooks {path.stem}"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run once, from top to bottom"
    assert [output for output in outputs_of(notebook) if output.output_type == "error"] == []
    assert len(outputs_of(notebook)) >= len(code) / 2
    assert path.stat().st_size < 400 * 2**10
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"(?<![\w.~])/(?:tmp|home|root|Users|dev/shm|work|usr|opt)/[\w./-]*", text) == []
    assert "\\u001b" not in text, "no colours of a terminal"


def test_outputs_lose_what_is_of_one_machine(tmp_path: Path) -> None:
    pytest.importorskip("nbclient", reason="needs the notebooks extra: nbclient")
    from tools.notebooks import without_machine

    text = (
        f"in {tmp_path}/TMPDIR/first-run-ab1_9xyz/run on {socket.gethostname()}, \x1b[31mred\x1b[0m, {sys.prefix}/bin"
    )
    assert without_machine(text, tmp_path) == "in first-run/run on host, red, venv/bin"


def check_first_run(notebook: Any) -> None:
    printed, (shown,) = printed_by(notebook), html_of(notebook, "output = trainer.train()")
    assert has_picture(notebook), "the losses are not drawn"
    assert "peft-mux" in shown
    assert len(re.findall(r"<svg", shown)) == 3, "one output, with a chart of each task"
    assert shown.count(">succeeded<") == 3
    assert 'Did you mean "adamw_torch"' in printed
    for name in ("mood", "kind", "action"):
        assert f"run/{name}/adapter_model.safetensors" in printed
        assert re.search(rf"^{name} +right answers +\d+% -> +(9\d|100)%$", printed, flags=re.MULTILINE), name
        assert len(re.findall(rf"^{name} +' \w+'$", printed, flags=re.MULTILINE)) == 2, "they answer together"
    assert float(re.findall(r"difference of a weight matrix: (\S+)", printed)[0]) < 1e-4


def check_your_own_data(notebook: Any) -> None:
    printed = printed_by(notebook)
    assert "sums, prompt_completion: zero and zero make[ zero<|end|>]" in printed
    assert "asked, prompt_completion: zero and zero make[ zero<|end|>]" in printed
    assert printed.count("chat, messages: user: Is 0 even?\n[yes<|end|>]") == 2, "the assistant alone carries loss"
    assert "### Response:\n[zero<|end|>]" in printed
    assert "cut 100.0%" in printed
    assert printed.count("8 held-out rows are trained on as well") == 1, "and not after that is fixed"
    for message in (
        (
            r'must have the columns .*, got columns question, answer.* row_format={"prompt": "question", '
            r'"completion": "answer"}'
        ),
        "has messages, which need a tokenizer with a chat template",
        "none of which can be trained on .*Raise max_length",
        "row 40 column completion must be a string, got None",
        r"row 40 column completion must be in every row",
        r"row 40 column completion must be a string.*got 3 \(int\).*For a CSV file: .*cast_column",
        r"must be rows with conversations.*got columns prompt, completion",
        r"sum.csv', which does not exist",
        "got an empty dataset",
    ):
        assert re.search(message, printed), message
    trained = re.findall(r"^(\w+): succeeded$", printed, flags=re.MULTILINE)
    assert trained == ["text", "sums", "alpaca", "shared", "asked"]


def check_twenty_adapters(notebook: Any) -> None:
    printed, shown = printed_by(notebook), html_of(notebook)
    assert any("peft-mux" in one for one in shown), "the run as it went on"
    assert any(one.count("<tr>") == 21 for one in shown), "the ranking"
    assert has_picture(notebook)
    assert 'Did you mean "peft_config.r"?' in printed
    ended, taken, asked = map(int, re.findall(r"(\d+) of 20 ended early; (\d+) of (\d+) steps", printed)[0])
    assert (ended, asked) == (19, 20 * 64)
    assert taken < asked / 4
    one, twenty = (float(value) for value in re.findall(r"tasks: ([\d.]+) MiB", printed))
    assert one < twenty < 20 * one, "one model for all"
    assert re.search(r"with the adapter: +(8\d|9\d|100)%", printed)
    assert float(re.findall(r"difference of a weight matrix: (\S+)", printed)[0]) < 1e-4


def check_live(notebook: Any) -> None:
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


def check_many_processes(notebook: Any) -> None:
    printed = printed_by(notebook)
    assert [int(rank) for rank in re.findall(r"^rank (\d): [\d,]+ tokens", printed, re.MULTILINE)] == [0, 1]
    for name in ("mood", "kind"):
        assert re.search(rf"^{name}: (1[5-9]|20) of 20 held-out answers begin right$", printed, re.MULTILINE)
        assert float(re.findall(rf"^{name}: largest .* (\S+)$", printed, re.MULTILINE)[0]) < 1e-3
    assert re.search(r"^stage 1 \|[.A-Za-z]+\|$", printed, re.MULTILINE), "the time line"
    assert has_picture(notebook)
    assert re.search(r"^plan  6 tasks on 2 x A100-80GB, \d hTasks, 2 stages", printed, re.MULTILINE)
    rates = re.findall(r"^(\d) stages of (\d): +[\d,]+ tokens/s predicted", printed, re.MULTILINE)
    assert rates == [("4", "1"), ("2", "2"), ("1", "4")]
    assert re.search(r"replicas='<\d,\d>", printed)


CHECKS: dict[str, Callable[[Any], None]] = {
    "01_first_run": check_first_run,
    "02_your_own_data": check_your_own_data,
    "03_twenty_adapters": check_twenty_adapters,
    "04_live": check_live,
    "05_many_processes": check_many_processes,
}


@pytest.mark.parametrize("name", NAMES)
def test_stored_outputs_show_what_the_text_says(name: str) -> None:
    CHECKS[name](stored(name))


@pytest.mark.notebook
@pytest.mark.distributed
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == NAMES[0] else pytest.mark.nightly) for name in NAMES]
)
def test_a_notebook_runs_to_its_end_and_shows_what_its_text_says(name: str, tmp_path: Path) -> None:
    CHECKS[name](run(name, tmp_path))
