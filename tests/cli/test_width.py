"""No line of a command is wider than the terminal, or than `COLUMNS`; in a file or a pipe lines are whole."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest

from peft_mux.cli.main import main
from peft_mux.log.lines import wrapped

LONG = "answers-to-questions-about-orders-and-invoices-2026"
TASKS = """\
model: backbone
output_dir: out
run: {{use_cpu: true, logging_steps: 1, report_to: none, max_steps: 4, per_device_train_batch_size: 2}}
defaults: {{dataset: rows.jsonl, learning_rate: 1e-2, peft: {{r: 4, target_modules: all-linear}}}}
tasks:
  sql: {{eval_dataset: rows.jsonl, eval_steps: 2}}
  {long}: {{}}
  one: {{}}
  two: {{}}
  three: {{}}
  dropped: {{peft: {{lora_dropout: 0.1}}}}
"""


@pytest.fixture
def place(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a file of six tasks, one of a long name, and a run of them; commands run there."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "__stdout__", io.StringIO())  # no terminal, even if one runs the tests
    monkeypatch.chdir(tmp_path)
    for name in ("backbone", "rows.jsonl"):
        (tmp_path / name).symlink_to(made / name)
    (tmp_path / "tasks.yaml").write_text(TASKS.format(long=LONG), encoding="utf-8")
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return what a command prints; commands that may be pasted into a shell, and files, are left out."""
    capsys.readouterr()
    main(list(words))
    out = capsys.readouterr().out
    return "\n".join(line for line in out.splitlines() if not re.match(r"(next )? *(peft-mux|PeftModel|vllm|/)", line))


def widest(text: str) -> int:
    return max(map(len, text.splitlines()), default=0)


@pytest.mark.slow
def test_no_line_of_any_command_is_wider_than_the_terminal(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = ["--deployment", "--devices", "4xA100-40GB"]
    commands = {
        "plan": ["plan", "tasks.yaml", "--gantt"],
        "explain": ["plan", "tasks.yaml", "--explain", "sql"],
        "deployment": ["plan", "tasks.yaml", *deployment],
        "validate": ["validate", "tasks.yaml"],
        "train": ["train", "tasks.yaml"],
        "status": ["status", "out"],
        "export": ["export", "out"],
        "sweep": ["train", "tasks.yaml", "--set", "output_dir=sweep", "--sweep", "tasks.sql.learning_rate=1e-3,1e-2"],
        "doctor": ["doctor"],
        "profile": ["profile", "tasks.yaml", "--seconds", "0.2"],
    }
    printed = {name: shown(capsys, *words) for name, words in commands.items()}
    assert {name: widest(text) for name, text in printed.items() if widest(text) > 80} == {}

    # No text is lost that was too wide.
    assert f"  {LONG}\n" in printed["plan"], "a name of its own line, and its numbers below"
    assert re.search(rf"^{LONG}: succeeded$", printed["train"], re.MULTILINE)
    assert re.search(r"^answ\S*…\S*2026 +succeeded +4/4 ", printed["train"], re.MULTILINE), "cut in the middle, marked"
    assert "adapters are in" in printed["train"]
    last_losses = printed["train"].split("step 4  ")[1].split("\n\n")[0].split("\nstep ")[0]
    assert len(re.findall(r"[a-z0-9-]+ \d+\.\d{4}\b", last_losses)) >= 6, "no name is torn from its number"
    assert len(re.findall(r"^ +sql .*succeeded|^\d +sql-0\d ", printed["sweep"], re.MULTILINE)) == 2
    assert "trl" in printed["doctor"]

    monkeypatch.setenv("COLUMNS", "120")
    wide = shown(capsys, *commands["plan"])
    assert 100 < widest(wide) <= 120
    monkeypatch.delenv("COLUMNS")
    assert widest(shown(capsys, *commands["validate"])) > 120, "a line in a file was broken"
    assert len(wide.splitlines()) < len(printed["plan"].splitlines())
    assert re.search(rf"^  {LONG} +1 ", wide, re.MULTILINE), "its name stands in the table"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("short  as it is", ["short  as it is"]),
        ("note  a text of many words that is longer", ["note  a text of many words", "      that is longer"]),
        ("a text of many words that is longer", ["a text of many words that is", "    longer"]),
        ("step 5  sql 2.310  qa 1.020  tales 4.1", ["step 5  sql 2.310  qa 1.020", "        tales 4.1"]),
        ("prefs step 5  eval_rewards/accuracies 0.50", ["prefs step 5", f"{'':14}eval_rewards/accuracies 0.50"]),
        ("a text that ends in a number: 12 %", ["a text that ends in a number:", "    12 %"]),
        ("in /a/path/that/is/longer/than/a/line here", ["in", "    /a/path/that/is/longer/than/a/line", "    here"]),
    ],
)
def test_long_lines_are_broken_at_spaces_below_their_label(text: str, lines: list[str]) -> None:
    assert wrapped(text, 30).split("\n") == lines
