"""The model card in a task's folder, the files next to it, and that files of the user are not overwritten."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from peft import LoraConfig

from peft_mux.demo.sentences import corpus
from peft_mux.demo.small_llama import make_backbone, make_tokenizer
from peft_mux.reporting.hub import is_edited, needs_tokenizer, write_card
from tests.invariants.mux_lab import rows, small_task
from tests.runs import task_of, trainer_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of two tasks."""
    root = tmp_path_factory.mktemp("cards") / "run"
    held_out = rows(9, 3, 5, 9)
    tasks = [
        small_task("sql", data_seed=1, rank=8, max_steps=6, eval_dataset=held_out, eval_steps=3),
        small_task("math", data_seed=2, max_steps=1),
    ]
    trainer_of(root, tasks, logging_steps=2).train()
    return root


def card_of(folder: Path, name: str) -> huggingface_hub.ModelCard:
    return huggingface_hub.ModelCard((folder / name / "README.md").read_text(encoding="utf-8"))


def test_a_card_says_how_the_adapter_came_about(folder: Path) -> None:
    card = card_of(folder, "sql")
    assert card.data.library_name == "peft"
    for part in (
        "| steps | 6 of 6 |",
        "| eval_loss | ",
        "| r | 8 |",
        "| learning_rate | 0.003 |",
        "| held-out rows | 3 |",
        "| form of the rows | ",
        "in a run of 2 tasks",
        "PeftModel.from_pretrained(",
        "Versions: peft-mux ",
    ):
        assert part in card.text, part
    assert "math" not in card.text, "another owner's task"
    assert str(folder) not in card.text


def test_a_card_asks_for_the_papers_and_libraries_to_be_cited_and_for_no_others(folder: Path) -> None:
    _, found, citation = card_of(folder, "sql").text.partition("\n## Citation\n")
    assert found
    titles = [line for line in citation.replace("{", "").replace("}", "").splitlines() if line.startswith("  title")]
    assert titles == [
        "  title = MuxTune: Efficient Multi-Task LLM Fine-Tuning in Multi-Tenant Datacenters via Spatial-Temporal "
        "Backbone Multiplexing,",
        "  title = LobRA: Multi-tenant Fine-tuning over Heterogeneous Data,",
        "  title = PEFT: State-of-the-art Parameter-Efficient Fine-Tuning methods,",
        "  title = Transformers: State-of-the-Art Natural Language Processing,",
    ]
    entries = citation[citation.index("```bibtex") : citation.rindex("```")]
    assert entries.count("{") == entries.count("}"), "it can be pasted"
    path = folder / "sql" / "README.md"
    assert not is_edited(path.read_text(encoding="utf-8"))
    assert is_edited(path.read_text(encoding="utf-8").replace("## Citation", "## My citation"))


def test_losses_are_pictured_where_there_is_more_than_one(folder: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs the plots extra")
    assert (folder / "sql" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "](loss.png)" in card_of(folder, "sql").text
    assert not (folder / "math" / "loss.png").exists()
    assert "loss.png" not in card_of(folder, "math").text


def test_a_card_is_written_again_until_it_is_a_file_or_a_link_of_the_user(folder: Path, tmp_path: Path) -> None:
    card, path = card_of(folder, "sql"), tmp_path / "README.md"
    assert write_card(tmp_path, card)
    assert write_card(tmp_path, card)
    edited = path.read_text(encoding="utf-8").replace("# sql", "# My adapter")
    for text in (edited, "", "mine", "<!-- written by peft_mux, digest 0; -->\n"):
        path.write_text(text, encoding="utf-8")
        assert is_edited(text)
        assert not write_card(tmp_path, card)
        assert path.read_text(encoding="utf-8") == text
    path.unlink()
    path.symlink_to(folder / "math" / "README.md")
    assert not write_card(tmp_path, card)


class Words:
    """A stand-in for a tokenizer of so many words."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def save_pretrained(self, folder: str) -> None: ...


@pytest.mark.parametrize(
    ("config", "template", "words", "needed"),
    [
        ({}, None, 97, False),
        ({}, None, 98, True),
        ({}, "{{ messages }}", 97, True),
        ({"trainable_token_indices": [3]}, None, 97, True),
        ({"modules_to_save": ["embed_tokens"]}, None, 97, True),
        ({"modules_to_save": ["score"]}, None, 97, False),
    ],
)
def test_tokenizer_files_are_needed_where_words_or_templates_are_the_tasks_own(
    config: dict[str, Any], template: str | None, words: int, needed: bool
) -> None:
    run: Any = SimpleNamespace(task=SimpleNamespace(peft_config=LoraConfig(r=2, **config), chat_template=template))
    assert needs_tokenizer(run, Words(words), 97) is needed
    assert not needs_tokenizer(run, None, 97)


def test_a_chat_template_of_a_task_goes_with_its_adapter_and_into_no_other(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(corpus(50))
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    chat = [{"messages": [{"role": "user", "content": "a cat"}, {"role": "assistant", "content": "runs"}]}] * 4
    own = small_task("own", data_seed=1, max_steps=1)
    talks = task_of("talks", chat, LoraConfig(r=2), chat_template=template, max_steps=1)
    backbone = make_backbone(tokenizer, hidden_size=32, num_layers=1)
    trainer_of(tmp_path, [own, talks], model=backbone, tokenizer=tokenizer).train()
    assert (tmp_path / "talks" / "chat_template.jinja").read_text(encoding="utf-8") == template
    assert (tmp_path / "talks" / "tokenizer.json").is_file()
    assert not (tmp_path / "own" / "tokenizer.json").exists()
    assert tokenizer.chat_template != template
