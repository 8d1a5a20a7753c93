"""Files that nobody has vouched for: whatever is in them, they are read in time or refused by file and line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peft_mux.cli.config_file import parse_value, read_config
from peft_mux.cli.main import main
from peft_mux.data.sources import encoding_fault
from peft_mux.errors import ConfigError


def refusal(folder: Path, text: str | bytes) -> str:
    path = folder / "tasks.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    assert "tasks.yaml" in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("text", ["[" * 5000, "{a: " * 3000])
def test_sections_nested_beyond_the_stack_are_refused(tmp_path: Path, text: str) -> None:
    assert "nested too deeply" in refusal(tmp_path, text)


def test_aliases_are_welcome() -> None:
    text = "a: &lora {r: 4}\nb: *lora\nc: {<<: *lora, r: 8}\n"
    assert parse_value(text, "x") == {"a": {"r": 4}, "b": {"r": 4}, "c": {"r": 8}}


# ------------------------------------------------------------------------- contents


@pytest.mark.parametrize(
    ("key", "meant"),
    [("yes", "true or false"), ("on", "true or false"), ("null", "nothing"), ("~", "nothing"), ("1", "a number")],
)
def test_a_key_that_yaml_reads_as_another_value_shall_be_quoted(tmp_path: Path, key: str, meant: str) -> None:
    told = refusal(tmp_path, f"model: m\ntasks:\n  {key}: {{dataset: rows.jsonl}}\n")
    assert f"tasks.yaml:3 tasks.{key}: got a key that YAML reads as {meant}" in told
    assert f'Write it in quotes: "{key}".' in told


def test_a_quoted_key_is_a_name(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    path = tmp_path / "tasks.yaml"
    path.write_text(
        "model: m\noutput_dir: out\nrun: {use_cpu: true}\nmodel_init_kwargs: {max_memory: {0: 1GiB}}\n"
        'tasks:\n  "yes": {dataset: rows.jsonl}\n  "1": {dataset: rows.jsonl}\n'
    )
    config = read_config(path)
    assert [task.name for task in config.tasks] == ["yes", "1"]
    assert config.model_init_kwargs == {"max_memory": {0: "1GiB"}}


@pytest.mark.parametrize(
    "text",
    [
        "when: 2024-13-45\n",
        "number: " + "9" * 5000 + "\n",
        "number: !!int x\n",
        "flag: !!bool maybe\n",
        "when: !!timestamp x\n",
        "? [a, b]\n: c\n",
        "? {a: b}\n: c\n",
        "model: m\n\ttasks: 1\n",
        "a: *nobody\n",
        "a: &x 1\nb: &x 2\n",
        "--- a\n--- b\n",
        "%YAML 9.9\n---\na: 1\n",
        b"\x00\x01\x02\x03",
        b"\xff\xfem\x00o\x00",
        b"\x89PNG\r\n\x1a\n",
        "model: caf\xe9".encode("latin1"),
        "",
        "# nothing but a comment\n",
    ],
)
def test_what_cannot_be_read_is_refused_by_file(tmp_path: Path, text: str | bytes) -> None:
    refusal(tmp_path, text)


@given(text=st.one_of(st.text(max_size=60), st.text(alphabet="ab:-&*?[]{}!<>|\"'#%@ \n\t0.1~", max_size=80)))
def test_any_text_is_a_file_or_refused(text: str, tmp_path: Path) -> None:
    refusal(tmp_path, text)


# ---------------------------------------------------------------------- files of rows


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv"])
def test_rows_that_are_not_utf_8_are_refused_by_file_line_and_remedy(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    header = "text\n" if name.endswith("csv") else ""
    row = "caf\xe9\n" if name.endswith("csv") else '{"text": "caf\xe9"}\n'
    plain = "ok\n" if name.endswith("csv") else '{"text": "ok"}\n'
    (tmp_path / name).write_bytes((header + plain + row).encode("latin1"))
    line = 3 if header else 2
    (tmp_path / "tasks.yaml").write_text(
        f"model: m\nrun: {{use_cpu: true}}\ntasks:\n  own: {{dataset: {name}, max_steps: 1}}\n"
    )
    assert main(["train", str(tmp_path / "tasks.yaml")]) == 2
    told = capsys.readouterr().err
    assert f"tasks.yaml:4 tasks.own.dataset: got {name} line {line}, byte 0xe9; allowed: UTF-8." in told
    assert f"iconv -f latin1 -t utf-8 {name}" in told


def test_a_character_that_lies_across_two_pieces_of_a_file_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    for before in (2**20 - 1, 2**20 - 2):
        path.write_bytes(b"a" * before + "\u20ac\n\u20ac".encode())
        assert encoding_fault(path, "x") == []
        path.write_bytes(b"a" * before + "\u20ac\n".encode() + b"\xe9\n")
        (fault,) = encoding_fault(path, "x")
        assert "line 2, byte 0xe9" in fault.got
    path.write_bytes(b"a\nb\n\xe2\x82")
    assert "line 3, byte 0xe2" in encoding_fault(path, "x")[0].got
