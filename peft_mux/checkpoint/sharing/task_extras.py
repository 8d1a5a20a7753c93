"""What lies in a task's folder beside its adapter: a model card, a picture of its losses, tokenizer files if needed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from peft import PeftConfig

from peft_mux import storage
from peft_mux.checkpoint.sharing.card import CARD_NAME, PICTURE_NAME, card_facts, is_edited, model_card, write_card
from peft_mux.errors import ConfigError
from peft_mux.reporting.page.plots import plot_task
from peft_mux.reporting.views import curve_of
from peft_mux.tasks.task_run import TaskRun


def write_extras(folder: Path, run: TaskRun, *, num_tasks: int, tokenizer: Any, vocab_size: int | None) -> None:
    """Write card, picture and tokenizer files into the folder of a task whose adapter lies there.

    Args:
        folder: the folder of the task.
        run: the task.
        num_tasks: tasks of its run.
        tokenizer: the tokenizer of the run, or `None`.
        vocab_size: words of the backbone, beyond which a tokenizer has been given more; `None` where that is not known.

    Raises:
        CheckpointError: if something cannot be written.
        OSError: if something cannot be read.
    """
    has_picture = _write_picture(folder, run)
    if needs_tokenizer(run, tokenizer, vocab_size):
        _write_tokenizer(folder, run, tokenizer)
    facts = card_facts(run, num_tasks=num_tasks, has_picture=has_picture)
    write_card(folder, model_card(folder, run.name, run.step, facts))


def _write_picture(folder: Path, run: TaskRun) -> bool:
    curves = {key: curve_of(run.state.log_history, key) for key in ("loss", "eval_loss")}
    # A single point is nothing to see.
    if max(map(len, curves.values())) < 2:
        return False
    try:
        storage.write_file(folder / PICTURE_NAME, plot_task(run.name, curves))
    except ConfigError:  # no matplotlib, which is an extra
        return False
    return True


def needs_tokenizer(run: TaskRun, tokenizer: Any, vocab_size: int | None) -> bool:
    """Return whether an adapter is of no use with the tokenizer of its backbone alone.

    It is where words were added, where embeddings of words are trained, or where the task has a chat template of its
    own.

    Args:
        run: the task.
        tokenizer: the tokenizer of the run, or `None`.
        vocab_size: words of the backbone; `None` where that is not known.
    """
    if not hasattr(tokenizer, "save_pretrained"):
        return False
    config: PeftConfig = run.task.peft_config
    saved = [str(name) for name in getattr(config, "modules_to_save", None) or ()]
    trains_words = bool(getattr(config, "trainable_token_indices", None)) or any("embed" in name for name in saved)
    has_more = vocab_size is not None and hasattr(tokenizer, "__len__") and len(tokenizer) > vocab_size
    return trains_words or has_more or run.task.chat_template is not None


def _write_tokenizer(folder: Path, run: TaskRun, tokenizer: Any) -> None:
    if run.task.chat_template is not None:
        # A copy: it is the tokenizer of all tasks.
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.chat_template = run.task.chat_template
    with storage.scratch_folder(folder) as scratch:
        tokenizer.save_pretrained(str(scratch))
        for path in sorted(scratch.iterdir()):
            if path.is_file():
                storage.replace_file(path, folder / path.name)


_TOKENIZER_FILES = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json vocab.txt merges.txt "
    "tokenizer.model spiece.model chat_template.jinja"
).split()


def extra_files(folder: Path | None) -> dict[str, bytes]:
    """Return what lies beside an adapter and is shared with it, by name: picture, tokenizer, a card of its owner's.

    Args:
        folder: the folder of the task; `None` where there is none.

    Raises:
        OSError: if a file cannot be read.
    """
    if folder is None:
        return {}
    paths = [folder / name for name in (PICTURE_NAME, *_TOKENIZER_FILES)]
    found = {path.name: path.read_bytes() for path in paths if path.is_file() and not path.is_symlink()}
    card = folder / CARD_NAME
    if card.is_file() and not card.is_symlink() and is_edited(text := card.read_text(encoding="utf-8")):
        found[CARD_NAME] = text.encode()
    return found
