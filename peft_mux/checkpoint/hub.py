"""One task's adapter on the Hub: its two files and a model card, and nothing else of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import huggingface_hub
from huggingface_hub import CommitOperationAdd, ModelCard, ModelCardData
from peft import PeftConfig

from peft_mux.checkpoint.run_folder import Weights
from peft_mux.errors import ConfigError, Fault, closest, raise_faults, shown
from peft_mux.modeling.adapters.files import CONFIG_NAME, WEIGHTS_NAME
from peft_mux.modeling.backbone.head_kinds import CLASSIFICATION, LANGUAGE_MODEL, TOKEN_CLASSIFICATION, head_kind_for
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.tasks.task_run import TaskRun

_PIPELINES = {
    CLASSIFICATION: "text-classification",
    TOKEN_CLASSIFICATION: "token-classification",
    LANGUAGE_MODEL: "text-generation",
}
_LOADING = """```python
{first}from peft import PeftModel
from transformers import {auto_class}

model = PeftModel.from_pretrained({auto_class}.from_pretrained("{base}"), "{repo_id}")
```"""


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
    model: MultiTaskPeftModel, run: TaskRun, weights: Weights | None, repo_id: str, options: Mapping[str, Any]
) -> Any:
    """Upload one task's adapter and its card as one commit, and return what the Hub says of it.

    Args:
        model: the model that holds the adapter.
        run: the task whose adapter is uploaded.
        weights: the whole adapter's weights, where the model holds only a part of it.
        repo_id: repository on the Hub; made where absent.
        options: some of `OPTIONS`, by name.

    Raises:
        ConfigError: if the Hub cannot be reached or refuses.
    """
    # Not the folder of the run, in which checkpoints, states and the adapters of other owners lie.
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model.save_task(run.name, folder, weights)
        upload = push_folder(folder, repo_id, run.step, options)
    return upload()


def push_folder(folder: Path, repo_id: str, num_steps: int, options: Mapping[str, Any]) -> Callable[[], Any]:
    """Return what uploads the adapter of a folder and its card as one commit; its files are read at once.

    Args:
        folder: folder with the adapter at its root, as PEFT writes it; nothing else of it is uploaded.
        repo_id: repository on the Hub; made where absent.
        num_steps: optimizer steps that the adapter was trained for.
        options: some of `OPTIONS`, by name.

    Returns:
        What uploads them, and raises a `ConfigError` where the Hub cannot be reached or refuses.

    Raises:
        OSError: if the folder has no adapter.
    """
    contents = {name: (folder / name).read_bytes() for name in (CONFIG_NAME, WEIGHTS_NAME)}
    contents["README.md"] = str(model_card(folder, repo_id, num_steps)).encode()
    files = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=data) for name, data in contents.items()]
    message = options.get("commit_message") or f"Adapter after {num_steps} steps"

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


def model_card(folder: Path, repo_id: str, num_steps: int) -> ModelCard:
    """Return the model card of one adapter, which claims no more than is known of it.

    Args:
        folder: folder of the adapter, as PEFT writes it.
        repo_id: repository that the card is for.
        num_steps: optimizer steps that the adapter was trained for.
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
    loading = _LOADING.format(first=first, auto_class=head.auto_class, base=shown_id, repo_id=repo_id)
    return ModelCard(
        f"---\n{data.to_yaml()}\n---\n\n# {repo_id.rsplit('/', 1)[-1]}\n\n"
        f"A {kind} adapter for {shown_base}, fine-tuned for {num_steps} optimizer steps with peft_mux. What rows it "
        f"was trained on is not recorded here.\n\n{loading}\n"
    )
