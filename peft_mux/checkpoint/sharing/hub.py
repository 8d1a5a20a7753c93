"""One task's adapter on the Hub: its files, a model card, what lies beside these, and nothing else of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import huggingface_hub
from huggingface_hub import CommitOperationAdd

from peft_mux.checkpoint.run_folder import Weights
from peft_mux.checkpoint.sharing.card import CARD_NAME, PICTURE_NAME, CardFacts, card_facts, card_for, model_card
from peft_mux.checkpoint.sharing.task_extras import extra_files
from peft_mux.errors import ConfigError, Fault, closest, raise_faults, shown
from peft_mux.modeling.adapters.files import CONFIG_NAME, WEIGHTS_NAME
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.reporting.words import counted
from peft_mux.tasks.task_run import TaskRun

OPTIONS = ("token", "private", "revision", "commit_message")
"""Options of `huggingface_hub` that an upload takes."""


def check_push(run: TaskRun, repo_id: object, options: Mapping[str, Any]) -> None:
    """Refuse an upload that cannot be meant.

    Args:
        run: the task whose adapter is to be uploaded.
        repo_id: name of the repository.
        options: options of `huggingface_hub`, by name.

    Raises:
        ConfigError: naming each fault.
    """
    faults = []
    try:
        huggingface_hub.utils.validate_repo_id(repo_id)  # type: ignore[arg-type]
        is_name = bool(repo_id)
    except (ValueError, TypeError):
        is_name = False
    if not is_name:
        faults.append(Fault("push_to_hub.repo_id", shown(repo_id), 'the name of a repository, such as "owner/name"'))
    for name in options:
        if name not in OPTIONS:
            faults.append(Fault(f"push_to_hub.{name}", "an unknown option", ", ".join(OPTIONS), closest(name, OPTIONS)))
    if run.step == 0:
        faults.append(Fault(f"tasks.{run.name}", "an adapter that was not trained", "one of a task that took a step"))
    raise_faults(faults)


def push_task(
    model: MultiTaskPeftModel,
    run: TaskRun,
    weights: Weights | None,
    repo_id: str,
    options: Mapping[str, Any],
    *,
    folder: Path | None = None,
    num_tasks: int = 1,
) -> Any:
    """Upload one task's adapter and its card as one commit, and return what the Hub says of it.

    Args:
        model: the model that holds the adapter.
        run: the task whose adapter is uploaded.
        weights: the whole adapter's weights, where the model holds only a part of it.
        repo_id: repository on the Hub; made where absent.
        options: some of `OPTIONS`, by name.
        folder: folder of the task in the run, whose picture, tokenizer and card of the owner's go with the adapter;
            `None` where nothing was saved.
        num_tasks: tasks of its run.

    Raises:
        ConfigError: if the Hub cannot be reached or refuses.
    """
    has_picture = folder is not None and (folder / PICTURE_NAME).is_file()
    facts = card_facts(run, num_tasks=num_tasks, has_picture=has_picture)
    # Not the folder of the run, in which checkpoints, states and the adapters of other owners lie.
    with TemporaryDirectory() as scratch:
        model.save_task(run.name, Path(scratch), weights)
        upload = push_folder(Path(scratch), repo_id, run.step, options, beside=folder, facts=facts)
    return upload()


def push_folder(
    folder: Path,
    repo_id: str,
    num_steps: int,
    options: Mapping[str, Any],
    *,
    beside: Path | None = None,
    facts: CardFacts | None = None,
) -> Callable[[], Any]:
    """Return what uploads the adapter of a folder and its card as one commit; its files are read at once.

    Args:
        folder: folder with the adapter at its root, as PEFT writes it; of the rest of it, only what is shared with it.
        repo_id: repository on the Hub; made where absent.
        num_steps: optimizer steps that the adapter was trained for.
        options: some of `OPTIONS`, by name.
        beside: folder with picture, tokenizer and a card of the owner's; by default the same.
        facts: how the adapter was trained; by default what the card in the folder says.

    Returns:
        What uploads them, and raises a `ConfigError` where the Hub cannot be reached or refuses.

    Raises:
        OSError: if the folder has no adapter.
    """
    contents = {name: (folder / name).read_bytes() for name in (CONFIG_NAME, WEIGHTS_NAME)}
    card = None if facts is not None else card_for(folder, repo_id)
    contents[CARD_NAME] = (card or str(model_card(folder, repo_id, num_steps, facts))).encode()
    contents |= extra_files(beside or folder)
    files = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=data) for name, data in contents.items()]
    message = options.get("commit_message") or f"Adapter after {counted(num_steps, 'step')}"

    def upload() -> Any:
        try:
            api = huggingface_hub.HfApi(token=options.get("token"))
            # Whoever gives no owner means the one of the token, whom the Hub names.
            made = api.create_repo(repo_id, private=options.get("private"), exist_ok=True)
            own_id = getattr(made, "repo_id", None) or repo_id
            return api.create_commit(own_id, files, commit_message=message, revision=options.get("revision"))
        # Of several HTTP libraries and of the Hub's own; each of them means that nothing was uploaded.
        except Exception as error:
            raise ConfigError(
                f'push_to_hub: got an error of the Hub for "{repo_id}": {error}; allowed: a repository that the token '
                "may write to, and a network. The adapter itself is as it was."
            ) from error

    return upload
