"""What a model card asks to be cited: the papers whose systems trained the adapter, and the libraries it stands on."""

# MERGED: The model card of one task's adapter: what it was trained from, on and how, and nothing that is not known.
# MERGED: A card that its owner has edited is theirs: what this package wrote carries a digest of itself, and a file
# MERGED: without it,
# MERGED: or with another text, is never written over.
# MERGED: What lies in a task's folder beside its adapter: a model card, a picture of its losses, tokenizer files if
# MERGED: needed.
# MERGED: One task's adapter on the Hub: its files, a model card, what lies beside these, and nothing else of a run.
# MERGED: `HubPushes`: `push_to_hub=True`, one repository a task, while the run goes on; a failed upload costs a notice.

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import huggingface_hub
from huggingface_hub import CommitOperationAdd, ModelCard, ModelCardData
from peft import PeftConfig

from peft_mux import storage
from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.checkpoint.run_folder import Weights
from peft_mux.engine.tasks.task_run import TaskRun
from peft_mux.errors import ConfigError, Fault, closest, installed_version, raise_faults, shown
from peft_mux.modeling.adapters.files import CONFIG_NAME, WEIGHTS_NAME
from peft_mux.modeling.backbone.modules import CLASSIFICATION, LANGUAGE_MODEL, TOKEN_CLASSIFICATION, head_kind_for
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.reporting.page import plot_task
from peft_mux.reporting.views import counted, curve_of

CITATION = r"""
## Citation

Trained with peft_mux, which realises the first two of these on the libraries of the others:

```bibtex
@article{muxtune,
  title = {{MuxTune}: Efficient Multi-Task {LLM} Fine-Tuning in Multi-Tenant Datacenters via Spatial-Temporal Backbone Multiplexing},
  author = {Chunyu Xue and Yi Pan and Weihao Cui and Quan Chen and Shulai Zhang and Bingsheng He and Minyi Guo},
  journal = {arXiv preprint arXiv:2603.02885},
  year = {2026}
}
@article{lobra,
  title = {{LobRA}: Multi-tenant Fine-tuning over Heterogeneous Data},
  author = {Sheng Lin and Fangcheng Fu and Haoyang Li and Hao Ge and Xuanyu Wang and Jiawen Niu and Yaofeng Tu and Bin Cui},
  journal = {Proceedings of the VLDB Endowment},
  volume = {18},
  number = {8},
  pages = {2616--2625},
  year = {2025},
  doi = {10.14778/3742728.3742752}
}
@misc{peft,
  title = {{PEFT}: State-of-the-art Parameter-Efficient Fine-Tuning methods},
  author = {Sourab Mangrulkar and Sylvain Gugger and Lysandre Debut and Younes Belkada and Sayak Paul and Benjamin Bossan and Marian Tietz},
  howpublished = {\url{https://github.com/huggingface/peft}},
  year = {2022}
}
@inproceedings{wolf-etal-2020-transformers,
  title = {Transformers: State-of-the-Art Natural Language Processing},
  author = {Thomas Wolf and Lysandre Debut and Victor Sanh and Julien Chaumond and Clement Delangue and others},
  booktitle = {Proceedings of the 2020 Conference on Empirical Methods in Natural Language Processing: System Demonstrations},
  pages = {38--45},
  year = {2020},
  url = {https://aclanthology.org/2020.emnlp-demos.6/}
}
```
"""  # noqa: E501


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


class HubPushes:
    """Uploads the adapters of tasks from the run folder, in a thread of their own.

    `hub_strategy="every_save"` uploads with each state of the run, as far as the upload before it is done
    (`hub_always_push=True`: in any case), and every strategy when a task has ended well.

    Args:
        args: the arguments of the run: its `hub_*` fields.
        root: the folder of the run, in which each task has its own.
        warn: prints a line that nobody may miss.
    """

    def __init__(self, args: MultiTaskTrainingArguments, root: Path, warn: Callable[[str], None]) -> None:
        """Upload nothing yet."""
        self._args, self._root, self._warn = args, root, warn
        self._pool: ThreadPoolExecutor | None = None
        self._under_way: dict[str, Future[Any]] = {}
        self._told: set[str] = set()

    def repo_id(self, run: TaskRun) -> str:
        """Return the repository of a task: its own, or that of the run or its folder with the task's name behind it."""
        return run.task.hub_model_id or f"{self._args.hub_model_id or self._root.resolve().name}-{run.name}"

    def saved(self, runs: list[TaskRun]) -> None:
        """Upload adapters that were written with a state of the run, where the strategy says so."""
        if getattr(self._args.hub_strategy, "value", self._args.hub_strategy) == "every_save":
            for run in runs:
                before = self._under_way.get(run.name)
                if before is None or before.done() or self._args.hub_always_push:
                    self._push(run)

    def ended(self, run: TaskRun) -> None:
        """Upload the adapter that a task has ended with."""
        self._push(run)

    def wait(self) -> None:
        """Wait for all uploads, and say which failed."""
        for name, future in list(self._under_way.items()):
            error = future.exception()
            if error is not None and name not in self._told:
                self._told.add(name)
                self._warn(f"{name}: not on the Hub: {error}")
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _push(self, run: TaskRun) -> None:
        if not self._args.push_to_hub:
            return
        # Read here, as the next state replaces the files while the upload goes on.
        try:
            upload = push_folder(self._root / run.name, self.repo_id(run), run.step, self._options())
        except (OSError, ConfigError) as error:
            self._warn(f"{run.name}: not on the Hub: {error}")
            return
        self._pool = self._pool or ThreadPoolExecutor(max_workers=1, thread_name_prefix="hub")
        self._under_way[run.name] = self._pool.submit(upload)

    def _options(self) -> dict[str, Any]:
        args = self._args
        return {"token": args.hub_token, "private": args.hub_private_repo, "revision": args.hub_revision}
