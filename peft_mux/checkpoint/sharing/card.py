"""The model card of one task's adapter: what it was trained from, on and how, and nothing that is not known.

A card that its owner has edited is theirs: what this package wrote carries a digest of itself, and a file without it,
or with another text, is never written over.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from peft import PeftConfig

from peft_mux import storage
from peft_mux.checkpoint.sharing.citation import CITATION
from peft_mux.compat import installed_version
from peft_mux.modeling.backbone.head_kinds import CLASSIFICATION, LANGUAGE_MODEL, TOKEN_CLASSIFICATION, head_kind_for
from peft_mux.reporting.words import counted
from peft_mux.tasks.task_run import TaskRun

CARD_NAME = "README.md"
PICTURE_NAME = "loss.png"

_PIPELINES = {
    CLASSIFICATION: "text-classification",
    TOKEN_CLASSIFICATION: "token-classification",
    LANGUAGE_MODEL: "text-generation",
}
_LOADING = """```python
{first}from peft import PeftModel
from transformers import {auto_class}

model = PeftModel.from_pretrained({auto_class}.from_pretrained("{base}"), "{place}")
```"""
_MARK = "<!-- written by peft_mux, digest {digest}; once you have edited this card, it is never written over -->\n"
_HERE = "PATH_OF_THIS_FOLDER"
_VERSIONS = ("peft-mux", "torch", "transformers", "peft")


@dataclass(frozen=True, slots=True)
class CardFacts:
    """What is known of a training.

    Attributes:
        data: what its rows were, by name.
        settings: its hyper-parameters, by name.
        results: what it came to, by name.
        num_tasks: tasks that shared the backbone in its run.
        has_picture: whether a picture of its losses lies beside the card.
    """

    data: Mapping[str, Any]
    settings: Mapping[str, Any]
    results: Mapping[str, Any]
    num_tasks: int
    has_picture: bool


def card_facts(run: TaskRun, *, num_tasks: int, has_picture: bool) -> CardFacts:
    """Return what a card says of a task.

    Args:
        run: the task.
        num_tasks: tasks of its run.
        has_picture: whether a picture of its losses lies beside the card.
    """
    report, held_out = run.loader.report, run.eval_data
    data = {
        "form of the rows": str(report.data_format),
        "rows": f"{report.num_kept:,}" if run.loader.steps_per_epoch is not None else "a stream",
        "tokens trained on": f"{run.num_tokens:,}",
        "held-out rows": "none" if held_out is None else f"{len(held_out):,}",
    }
    settings = {name: value for name, value in asdict(run.hyper).items() if value is not None}
    entries = [entry for entry in run.state.log_history if any(key.startswith("eval_") for key in entry)]
    if run.best.value is not None and run.best.keeps_weights:
        # Those of the adapter that was kept.
        entries = [entry for entry in entries if entry["step"] == run.best.step] or entries
    results = {"steps": f"{run.step:,} of {run.num_steps:,}", "status": run.status.value}
    results |= {"loss of the last step": _shown(run.last_loss)} if run.step else {}
    if entries:
        results |= {key: _shown(value) for key, value in entries[-1].items() if key.startswith("eval_")}
    return CardFacts(data, settings, results, num_tasks, has_picture)


def model_card(folder: Path, name: str, num_steps: int, facts: CardFacts | None = None) -> ModelCard:
    """Return the model card of one adapter, which claims no more than is known of it.

    Args:
        folder: folder of the adapter, as PEFT writes it.
        name: repository that the card is for, or the name of the task.
        num_steps: optimizer steps that the adapter was trained for.
        facts: how it was trained, as far as that is known.
    """
    config = PeftConfig.from_pretrained(str(folder))
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    head = head_kind_for(config.task_type)
    base = config.base_model_name_or_path or ""
    # The path of a folder on this machine names no model to anybody else.
    is_local = not base or Path(base).exists() or base.startswith(("/", ".", "~"))
    data = ModelCardData(
        base_model=None if is_local else base,
        library_name="peft",
        pipeline_tag=_PIPELINES[head],
        tags=[kind.lower(), "peft_mux"],
    )
    shown_base = "the base model that its owner trained it on" if is_local else f"`{base}`"
    # PEFT knows types of our own once this package is imported.
    first = "import peft_mux\n" if type(config).__module__.startswith("peft_mux.") else ""
    shown_id = "BASE_MODEL" if is_local else base
    place = name if "/" in name else _HERE
    loading = _LOADING.format(first=first, auto_class=head.auto_class, base=shown_id, place=place)
    text = (
        f"---\n{data.to_yaml()}\n---\n\n# {name.rsplit('/', 1)[-1]}\n\n"
        f"A {kind} adapter for {shown_base}, fine-tuned for {counted(num_steps, 'optimizer step')} with peft_mux. What "
        f"rows it was trained on is not recorded here.\n\n{loading}\n{_training(facts, config)}{CITATION}"
    )
    return ModelCard(text + _MARK.format(digest=_digest(text)))


def _training(facts: CardFacts | None, config: PeftConfig) -> str:
    if facts is None:
        return ""
    picture = f"\n![losses over the steps]({PICTURE_NAME})\n" if facts.has_picture else ""
    names = ("r", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save", "use_dora", "use_rslora")
    adapter = {name: value for name in names if (value := getattr(config, name, None)) not in (None, False)}
    adapter = {name: sorted(value) if isinstance(value, set) else value for name, value in adapter.items()}
    company = (
        "alone" if facts.num_tasks == 1 else f"in a run of {facts.num_tasks} tasks that shared the frozen backbone"
    )
    versions = ", ".join(f"{name} {installed_version(name) or 'of a checkout'}" for name in _VERSIONS)
    return (
        f"\n## Results\n\n{_table(facts.results)}{picture}\n## Training\n\nTrained {company}; each task of such a run "
        "has its own rows, optimizer, schedule and random state, and becomes what it would have become alone.\n\n"
        f"{_table({**facts.data, **adapter, **facts.settings})}\nVersions: {versions}.\n"
    )


def _table(pairs: Mapping[str, Any]) -> str:
    # A bar would end a cell.
    rows = "".join(f"| {name} | {str(value).replace('|', chr(92) + '|')} |\n" for name, value in pairs.items())
    return f"| | |\n|---|---|\n{rows}"


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_edited(card: str) -> bool:
    """Return whether a card is not, or no longer, what this package wrote."""
    text, found, mark = card.rpartition(_MARK.partition("{")[0])
    return not found or _MARK.format(digest=_digest(text)) != found + mark


def card_for(folder: Path, repo_id: str) -> str | None:
    """Return the card that this package wrote into a folder, for a repository; `None` where there is none, or another.

    Args:
        folder: the folder of the adapter.
        repo_id: the repository that it loads from.
    """
    path = folder / CARD_NAME
    if path.is_symlink() or not path.is_file() or is_edited(card := path.read_text(encoding="utf-8")):
        return None
    text = card.rpartition(_MARK.partition("{")[0])[0].replace(_HERE, repo_id)
    return text + _MARK.format(digest=_digest(text))


def write_card(folder: Path, card: ModelCard) -> bool:
    """Write a card into a folder; one that its owner has written or edited stays.

    Args:
        folder: the folder of the adapter.
        card: the card.

    Returns:
        Whether it was written.

    Raises:
        CheckpointError: if it cannot be written.
        OSError: if what stands there cannot be read.
    """
    path = folder / CARD_NAME
    if path.is_symlink() or (path.exists() and is_edited(path.read_text(encoding="utf-8", errors="replace"))):
        return False
    storage.write_file(path, str(card).encode())
    return True
