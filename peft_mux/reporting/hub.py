"""Sharing adapters: the model card of a task's adapter, the files next to it, and uploads to the Hub.

A card claims nothing that is not known. A card that its user has edited is never overwritten: the cards of this package
carry a digest of themselves, and a file without it, or with another text, is the user's. An upload holds the adapter of
one task, its card, and what lies next to these, and nothing else of a run.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import huggingface_hub
from huggingface_hub import CommitOperationAdd, ModelCard, ModelCardData
from peft import PeftConfig

from peft_mux import storage
from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.checkpoint.run_folder import Weights
from peft_mux.engine.tasks.active_task import ActiveTask
from peft_mux.errors import ConfigError, Fault, closest, installed_version, raise_faults, shown
from peft_mux.log.callbacks import Observer
from peft_mux.log.lines import counted
from peft_mux.modeling.adapters.files import CONFIG_NAME, WEIGHTS_NAME, saved_num_labels
from peft_mux.modeling.backbone.modules import CLASSIFICATION, LANGUAGE_MODEL, TOKEN_CLASSIFICATION, head_kind_for
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.reporting.page import draw_losses
from peft_mux.reporting.views import metrics_of, view_of
from peft_mux.task import TaskStatus

CITATION = Path(__file__).with_name("citation.md")
"""The last section of every card."""
CARD_NAME = "README.md"
PICTURE_NAME = "loss.png"
OPTIONS = ("token", "private", "revision", "commit_message")
"""Options of `huggingface_hub` that an upload takes."""
_PIPELINES = {
    CLASSIFICATION: "text-classification",
    TOKEN_CLASSIFICATION: "token-classification",
    LANGUAGE_MODEL: "text-generation",
}
_LOADING = """```python
{first}from peft import PeftModel
from transformers import {auto_class}

model = PeftModel.from_pretrained({auto_class}.from_pretrained("{base}"{classes}), "{place}")
```"""
_MARK = "<!-- written by peft_mux, digest {digest}; once you have edited this card, it is never written over -->\n"
_HERE = "PATH_OF_THIS_FOLDER"
_VERSIONS = ("peft-mux", "torch", "transformers", "peft")
_ADAPTER_FIELDS = ("r", "lora_alpha", "lora_dropout", "target_modules", "modules_to_save", "use_dora", "use_rslora")
_TOKENIZER_FILES = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json vocab.txt merges.txt "
    "tokenizer.model spiece.model chat_template.jinja"
).split()

# ---------------------------------------------------------------- the model card


def model_card(
    folder: Path,
    name: str,
    num_steps: int,
    run: ActiveTask | None = None,
    *,
    num_tasks: int = 1,
    has_picture: bool = False,
) -> ModelCard:
    """Return the model card of one adapter.

    Args:
        folder: folder of the adapter, as PEFT writes it.
        name: repository that the card is for, or the name of the task.
        num_steps: optimizer steps that the adapter was trained for.
        run: the task that it was trained as, if that is known.
        num_tasks: tasks of its run.
        has_picture: whether a picture of its losses lies next to the card.
    """
    config = PeftConfig.from_pretrained(str(folder))
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    head = head_kind_for(config.task_type)
    base = config.base_model_name_or_path or ""
    is_local = _is_local(base)
    data = ModelCardData(
        base_model=None if is_local and "/" in name else base or None,
        library_name="peft",
        pipeline_tag=_PIPELINES[head],
        tags=[kind.lower(), "peft_mux"],
    )
    shown_base = "the local base model on which it was trained" if is_local else f"`{base}`"
    loading = _LOADING.format(
        # PEFT knows types of our own once this package is imported.
        first="import peft_mux\n" if type(config).__module__.startswith("peft_mux.") else "",
        auto_class=head.auto_class,
        classes="" if head.is_shared else f", num_labels={saved_num_labels(folder)}",
        base="BASE_MODEL" if is_local else base,
        place=name if "/" in name else _HERE,
    )
    training = "" if run is None else _training_section(run, config, num_tasks=num_tasks, has_picture=has_picture)
    text = (
        f"---\n{data.to_yaml()}\n---\n\n# {name.rsplit('/', 1)[-1]}\n\n"
        f"A {kind} adapter for {shown_base}, fine-tuned for {counted(num_steps, 'optimizer step')} with peft_mux. What "
        f"rows it was trained on is not recorded here.\n\n{loading}\n{training}\n{CITATION.read_text(encoding='utf-8')}"
    )
    return ModelCard(_marked(text))


def _is_local(base: str) -> bool:
    """Return whether a backbone has no name, or the path of a folder, by which others could not load it."""
    return not base or Path(base).exists() or base.startswith(("/", ".", "~"))


def _training_section(run: ActiveTask, config: PeftConfig, *, num_tasks: int, has_picture: bool) -> str:
    """Return a card's facts about the training: its results, rows, adapter, hyper-parameters and versions."""
    results: dict[str, Any] = {"steps": f"{run.step:,} of {run.num_steps:,}", "status": run.status.value}
    if run.step:
        results["loss of the last step"] = run.last_loss
    entries = [entry for entry in run.state.log_history if any(key.startswith("eval_") for key in entry)]
    if run.best.value is not None and run.best.keeps_weights:
        # Those of the adapter that was kept.
        entries = [entry for entry in entries if entry["step"] == run.best.step] or entries
    # Several data sets have an entry each.
    entries = [entry for entry in entries if entry["step"] == entries[-1]["step"]]
    results |= {key: value for entry in entries for key, value in entry.items() if key.startswith("eval_")}
    for name, (points, _) in metrics_of(run.state.log_history).items():
        if points and name not in ("grad_norm", "learning_rate"):
            results[f"{name} of training rows, last logged"] = points[-1][1]
    results = {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in results.items()}
    adapter = {name: value for name in _ADAPTER_FIELDS if (value := getattr(config, name, None)) not in (None, False)}
    settings = {
        "form of the rows": run.loader.report.data_format,
        "rows": f"{run.loader.report.num_kept:,}" if run.loader.steps_per_epoch is not None else "a stream",
        "tokens trained on": f"{run.num_tokens:,}",
        "held-out rows": ", ".join(f"{len(rows):,}" for rows in run.eval_data.values()) or "none",
        **{name: sorted(value) if isinstance(value, set) else value for name, value in adapter.items()},
        **{name: value for name, value in asdict(run.hyper).items() if value is not None},
    }
    tables = []
    for pairs in (results, settings):
        # A bar would end a cell.
        cells = [(name, str(value).replace("|", r"\|")) for name, value in pairs.items()]
        tables.append("| | |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in cells))
    picture = f"\n![losses over the steps]({PICTURE_NAME})\n" if has_picture else ""
    company = "alone" if num_tasks == 1 else f"in a run of {num_tasks} tasks that shared the frozen backbone"
    versions = ", ".join(f"{name} {installed_version(name) or 'of a checkout'}" for name in _VERSIONS)
    return (
        f"\n## Results\n\n{tables[0]}{picture}\n## Training\n\nTrained {company}; each task of such a run "
        "has its own rows, optimizer, schedule and random state, and becomes what it would have become alone.\n\n"
        f"{tables[1]}\nVersions: {versions}.\n"
    )


def _marked(text: str) -> str:
    """Return the text of a card with its digest, by which an edited card is recognised."""
    return text + _MARK.format(digest=hashlib.sha256(text.encode()).hexdigest()[:16])


def is_edited(card: str) -> bool:
    """Return whether a card was written or edited by someone other than this package."""
    return _marked(card.rpartition(_MARK.partition("{")[0])[0]) != card


def _text_of(card: Path) -> str:
    # A card in another encoding has been written by its user; it is only compared here.
    return card.read_text(encoding="utf-8", errors="replace")


def write_card(folder: Path, card: ModelCard) -> bool:
    """Write a card into the folder of an adapter unless its user has written or edited one; return whether it did.

    Raises:
        CheckpointError: if it cannot be written.
        OSError: if the present card cannot be read.
    """
    path = folder / CARD_NAME
    if path.is_symlink() or (path.exists() and is_edited(_text_of(path))):
        return False
    storage.write_file(path, str(card).encode())
    return True


# ---------------------------------------------------------------- files next to an adapter


def needs_tokenizer(run: ActiveTask, tokenizer: Any, vocab_size: int | None) -> bool:
    """Return whether an adapter does not work with the tokenizer of its backbone.

    That is so if tokens were added, embeddings of tokens are trained, or the task has a chat template of its own.
    """
    if not hasattr(tokenizer, "save_pretrained"):
        return False
    config: PeftConfig = run.task.peft_config
    saved = [str(name) for name in getattr(config, "modules_to_save", None) or ()]
    trains_tokens = bool(getattr(config, "trainable_token_indices", None)) or any("embed" in name for name in saved)
    has_more = vocab_size is not None and hasattr(tokenizer, "__len__") and len(tokenizer) > vocab_size
    return trains_tokens or has_more or run.task.chat_template is not None


def write_task_files(folder: Path, task: ActiveTask, num_tasks: int, tokenizer: Any, model: Any) -> None:
    """Write the card of an adapter, its plot and its tokenizer next to it.

    Args:
        folder: the folder of the adapter.
        task: the task that it was trained as.
        num_tasks: tasks of its run.
        tokenizer: the tokenizer of the run, which is written if the backbone's own does not suit the adapter.
        model: the model of the run.

    Raises:
        CheckpointError: if something cannot be written.
        OSError: if the present card cannot be read.
    """
    view = view_of(task)
    has_picture = max(len(view.losses), len(view.eval_losses)) > 1  # a single point shows nothing
    if has_picture:
        try:
            storage.write_file(folder / PICTURE_NAME, draw_losses([view]))
        except ConfigError:  # matplotlib is an extra
            has_picture = False
    config = getattr(getattr(model, "backbone", None), "config", None)
    # A tokenizer with more tokens than the backbone knows has been extended.
    if needs_tokenizer(task, tokenizer, getattr(config, "vocab_size", None)):
        if task.task.chat_template is not None:
            tokenizer = copy.deepcopy(tokenizer)  # other tasks use it too
            tokenizer.chat_template = task.task.chat_template
        with storage.scratch_folder(folder) as scratch:
            tokenizer.save_pretrained(str(scratch))
            for path in sorted(scratch.iterdir()):
                if path.is_file():
                    storage.replace_file(path, folder / path.name)
    write_card(folder, model_card(folder, task.name, task.step, task, num_tasks=num_tasks, has_picture=has_picture))


# ---------------------------------------------------------------- uploads


def check_push(run: ActiveTask, repo_id: object, options: Mapping[str, Any]) -> None:
    """Check the arguments of `push_to_hub`.

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
        faults.append(Fault("push_to_hub.repo_id", shown(repo_id), 'the name of a repository, such as "user/name"'))
    for name in options:
        if name not in OPTIONS:
            faults.append(
                Fault(
                    f"push_to_hub.{name}", "an unknown option", f"one of {', '.join(OPTIONS)}", closest(name, OPTIONS)
                )
            )
    if run.step == 0:
        faults.append(Fault(f"tasks.{run.name}", "one without a step", "a task that has taken a step"))
    raise_faults(faults)


def push_task(
    model: MultiTaskPeftModel,
    run: ActiveTask,
    weights: Weights | None,
    repo_id: str,
    options: Mapping[str, Any],
    *,
    folder: Path | None = None,
    num_tasks: int = 1,
) -> Any:
    """Upload one task's adapter and its card as one commit, and return the Hub's answer.

    Args:
        model: the model that holds the adapter.
        run: the task whose adapter is uploaded.
        weights: the whole adapter's weights, if the model holds only a part of it.
        repo_id: repository on the Hub; created if it does not exist.
        options: some of `OPTIONS`, by name.
        folder: folder of the task in the run, whose picture, tokenizer and edited card are uploaded with the adapter;
            `None` if nothing was saved.
        num_tasks: tasks of its run.

    Raises:
        ConfigError: if the Hub cannot be reached or refuses.
    """
    has_picture = folder is not None and (folder / PICTURE_NAME).is_file()
    # Not the folder of the run, which holds checkpoints, states and the adapters of other users.
    with TemporaryDirectory() as scratch:
        model.save_task(run.name, Path(scratch), weights)
        card = model_card(Path(scratch), repo_id, run.step, run, num_tasks=num_tasks, has_picture=has_picture)
        storage.write_file(Path(scratch, CARD_NAME), str(card).encode())
        return _prepare_upload(Path(scratch), folder, repo_id, run.step, options)()


def _prepare_upload(
    folder: Path, extras: Path | None, repo_id: str, num_steps: int, options: Mapping[str, Any]
) -> Callable[[], Any]:
    """Read the files of an adapter now, and return a function that uploads them as one commit.

    Args:
        folder: folder with the adapter, as PEFT writes it, and its card, if this package wrote one.
        extras: folder with its picture, tokenizer and an edited card, if there is one.
        repo_id: repository on the Hub; created if it does not exist.
        num_steps: optimizer steps that the adapter was trained for.
        options: some of `OPTIONS`, by name.
    """
    contents = {name: (folder / name).read_bytes() for name in (CONFIG_NAME, WEIGHTS_NAME)}
    written = folder / CARD_NAME
    if written.is_file() and not is_edited(text := _text_of(written)):
        # It now loads from its repository, and the Hub refuses paths of backbones.
        card = ModelCard(text.rpartition(_MARK.partition("{")[0])[0].replace(_HERE, repo_id))
        if _is_local(card.data.base_model or ""):
            card.data.base_model = None
        contents[CARD_NAME] = _marked(str(card)).encode()
    else:
        contents[CARD_NAME] = str(model_card(folder, repo_id, num_steps)).encode()
    if extras is not None:
        paths = [extras / name for name in (PICTURE_NAME, *_TOKENIZER_FILES)]
        card_path = extras / CARD_NAME
        if card_path.is_file() and is_edited(_text_of(card_path)):
            paths.append(card_path)
        contents |= {path.name: path.read_bytes() for path in paths if path.is_file() and not path.is_symlink()}
    files = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=data) for name, data in contents.items()]

    def upload() -> Any:
        try:
            api = huggingface_hub.HfApi(token=options.get("token"))
            # A repository without a namespace belongs to the user of the token; the Hub returns the full name.
            made = api.create_repo(repo_id, private=options.get("private"), exist_ok=True)
            return api.create_commit(
                getattr(made, "repo_id", None) or repo_id,
                files,
                commit_message=options.get("commit_message") or f"Adapter after {counted(num_steps, 'step')}",
                revision=options.get("revision"),
            )
        # Errors of several HTTP libraries and of the Hub itself: each means that nothing was uploaded.
        except Exception as error:
            raise ConfigError(
                f'the upload to "{repo_id}" failed: {error}. It needs a repository that the token may write '
                "to, and a network. The adapter itself is unchanged."
            ) from error

    return upload


class HubPushes(Observer):
    """Uploads the adapters of tasks from the run folder in the background, each to a repository of its own.

    With `hub_strategy="every_save"` each state of the run is uploaded, unless the upload before it is not done yet
    (`hub_always_push=True`: in any case); with every strategy, a task that has ended well.

    Args:
        args: the arguments of the run: its `hub_*` fields.
        root: the folder of the run, in which each task has its own.
        warn: prints a line that must not be missed.
    """

    def __init__(self, args: MultiTaskTrainingArguments, root: Path, warn: Callable[[str], None]) -> None:
        self._args, self._root, self._warn = args, root, warn
        self._api: huggingface_hub.HfApi | None = None
        self._under_way: dict[str, Future[Any]] = {}
        self._reported: set[str] = set()

    def on_saved(self, tasks: Sequence[ActiveTask]) -> None:
        """Upload adapters that were written with a state of the run, if the strategy says so."""
        if getattr(self._args.hub_strategy, "value", self._args.hub_strategy) == "every_save":
            for task in tasks:
                before = self._under_way.get(task.name)
                if before is None or before.done() or self._args.hub_always_push:
                    self._push(task)

    def on_task_end(self, task: ActiveTask) -> None:
        """Upload the adapter of a task that has ended well, with its card and its picture, which are written by now."""
        if task.status in (TaskStatus.SUCCEEDED, TaskStatus.STOPPED_EARLY):
            self._push(task)

    def _push(self, run: ActiveTask) -> None:
        """Upload the adapter of a task in the run folder."""
        args = self._args
        folder = self._root / run.name
        repo_id = run.task.hub_model_id or f"{args.hub_model_id or self._root.resolve().name}-{run.name}"
        options = {"token": args.hub_token, "private": args.hub_private_repo, "revision": args.hub_revision}
        # Files are read now, because the next state replaces them during the upload.
        try:
            upload = _prepare_upload(folder, folder, repo_id, run.step, options)
        except (OSError, ConfigError) as error:
            self._warn(f"{run.name}: not on the Hub: {error}")
            return
        self._api = self._api or huggingface_hub.HfApi()
        self._under_way[run.name] = self._api.run_as_future(upload)

    def on_end(self) -> None:
        """Wait for all uploads, and report those that failed."""
        for name, future in list(self._under_way.items()):
            error = future.exception()
            if error is not None and name not in self._reported:
                self._reported.add(name)
                self._warn(f"{name}: not on the Hub: {error}")
