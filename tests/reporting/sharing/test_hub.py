"""Adapters on a stand-in of the Hub that speaks its HTTP interface: what `push_to_hub=True` leaves there."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from peft import PeftModel

from peft_mux import MultiTaskTrainer
from tests.invariants.mux_lab import small_task, tiny_llama
from tests.runs import trainer_of


class StandIn(ThreadingHTTPServer):
    """Keeps repositories of the user "me": files by name, as they were committed."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, Any] = {}
        self.commits: list[tuple[str, str]] = []
        self.tokens: set[str | None] = set()
        self.refuses = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def log_message(self, *arguments: Any) -> None:
        del arguments

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.tokens.add(self.headers.get("authorization"))
        path = self.path.partition("?")[0]
        if path == "/api/repos/create":
            self._create(json.loads(body))
        elif path.endswith("/preupload/main"):
            files = [{"path": one["path"], "uploadMode": "regular"} for one in json.loads(body)["files"]]
            self._answer({"files": [{**one, "shouldIgnore": False, "oid": None} for one in files]})
        elif path.endswith("/commit/main"):
            self._commit(path.removeprefix("/api/models/").removesuffix("/commit/main"), body)
        elif path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        else:
            self._answer({"error": f"no such path: {path}"}, 404)

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if self.server.refuses and self.server.refuses in name:
            self._answer({"error": "no right to make it"}, 403)
            return
        status = 409 if name in self.server.repositories else 200
        self.server.repositories.setdefault(name, {})
        self.server.private[name] = asked.get("private") or asked.get("visibility") == "private"
        self._answer({"url": f"{self.server.url}/{name}", "id": name, "name": name}, status)

    def _commit(self, name: str, body: bytes) -> None:
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "header":
                self.server.commits.append((name, line["value"]["summary"]))
            elif line["key"] == "file":
                self.server.repositories[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        self._answer({"commitUrl": f"{self.server.url}/{name}/commit/1", "commitOid": "1", "hookOutput": ""})

    def _answer(self, content: Any, status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    stand_in = StandIn()
    threading.Thread(target=stand_in.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", stand_in.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    huggingface_hub.close_session()
    yield stand_in
    stand_in.shutdown()
    stand_in.server_close()
    huggingface_hub.close_session()


def trained(folder: Path, **options: Any) -> MultiTaskTrainer:
    of_math = {"hub_model_id": options.pop("id_of_math", None)}
    tasks = [small_task("sql", data_seed=1, max_steps=2), small_task("math", data_seed=2, max_steps=4, **of_math)]
    trainer = trainer_of(folder, tasks, logging_steps=2, push_to_hub=True, hub_token="hf_secret", **options)
    trainer.train()
    return trainer


def test_each_task_gets_a_repository_of_its_own_with_its_adapter_card_and_picture(
    hub: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_llama()
    model.name_or_path = str(tmp_path)  # as if it had been loaded from there
    trained(tmp_path / "support", hub_private_repo=True, model=model).save_model(str(tmp_path / "saved"))
    assert sorted(hub.repositories) == ["me/support-math", "me/support-sql"]
    assert set(hub.private.values()) == {True}
    for name, files in hub.repositories.items():
        wanted = {"README.md", "adapter_config.json", "adapter_model.safetensors", "loss.png"}
        assert wanted - {"loss.png"} <= set(files) <= wanted
        assert "A LORA adapter for" in files["README.md"].decode()
        assert f'{name.partition("/")[2]}")' in files["README.md"].decode(), "it loads from its repository"
        steps = 2 if name.endswith("sql") else 4
        assert f"| steps | {steps} of {steps} |" in files["README.md"].decode()
        assert str(tmp_path) not in files["README.md"].decode(), "the Hub refuses paths"
        own = tmp_path / "support" / name.rpartition("-")[2]
        for folder in (own, tmp_path / "saved" / own.name):
            assert huggingface_hub.ModelCard.load(folder / "README.md").data.base_model == str(tmp_path)
        assert files["adapter_model.safetensors"] == (own / "adapter_model.safetensors").read_bytes()
    (tmp_path / "copy").mkdir()
    for name, data in hub.repositories["me/support-sql"].items():
        (tmp_path / "copy" / name).write_bytes(data)
    assert PeftModel.from_pretrained(tiny_llama(), tmp_path / "copy").peft_config["default"].r == 4
    assert hub.tokens == {"Bearer hf_secret"}
    assert "hf_secret" not in capsys.readouterr().out
    assert not any("hf_secret" in path.read_text("utf-8") for path in (tmp_path / "support").glob("*.[jh]*"))


def test_repositories_are_named_after_hub_model_id_and_an_edited_card_goes_up_as_it_is(
    hub: StandIn, tmp_path: Path
) -> None:
    trainer = trained(tmp_path / "run", hub_model_id="org/mine", id_of_math="me/sums", hub_strategy="end")
    assert hub.commits == [("org/mine-sql", "Adapter after 2 steps"), ("me/sums", "Adapter after 4 steps")]
    card = tmp_path / "run" / "sql" / "README.md"
    card.write_text(card.read_text("utf-8").replace("# sql", "# Of my own"), encoding="utf-8")
    trainer.push_to_hub("sql", repo_id="org/mine-sql", token="t")
    assert "# Of my own" in hub.repositories["org/mine-sql"]["README.md"].decode()


def test_a_repository_that_is_refused_costs_a_line_and_no_other_task(
    hub: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.refuses = "sql"
    trainer = trained(tmp_path / "run", save_steps=2, hub_always_push=True)
    assert set(trainer.task_statuses.values()) == {"succeeded"}
    assert hub.commits == [("me/run-math", f"Adapter after {step} steps") for step in (2, 4)], "every save"
    printed = capsys.readouterr().out
    assert printed.count('sql: not on the Hub: the upload to "run-sql" failed') == 1
    assert "math: not on" not in printed


def test_a_card_of_the_user_in_another_encoding_ends_no_run(
    hub: StandIn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = tmp_path / "run" / "sql" / "README.md"
    card.parent.mkdir(parents=True)
    card.write_bytes("# für mich".encode("latin1"))
    trainer = trained(tmp_path / "run")
    assert set(trainer.task_statuses.values()) == {"succeeded"}
    assert card.read_bytes() == "# für mich".encode("latin1")
    assert "sql: not on the Hub" in capsys.readouterr().out, "the Hub takes none but UTF-8"
    assert "adapter_model.safetensors" in hub.repositories["me/run-math"]
