"""Where the backbone comes from: a hub id or folder, a model, or a `MultiTaskPeftModel`.

A hub id or folder is first only described: its modules are built on the meta device, so that target modules can be
checked and a plan be made before any weight is read. The weights follow when training begins.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto import modeling_auto

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.engine.tasks.active_task import ResolvedTask
from peft_mux.engine.tasks.optimizer import page_kind_of
from peft_mux.engine.tasks.setup import adapters_of
from peft_mux.errors import ConfigError, Fault, closest, raise_faults, shown
from peft_mux.modeling.adapters.checks import config_faults
from peft_mux.modeling.backbone.modules import HEAD_KINDS, HEAD_NAMES, TOKEN_CLASSIFICATION, HeadKind
from peft_mux.modeling.backbone.quantized import (
    prepare_quantized,
    quantization_of,
    quantize_description,
    require_bitsandbytes,
)
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.objectives.task_objective import smoothing_faults

_HUB_OPTIONS = "revision code_revision subfolder token cache_dir local_files_only force_download proxies".split()
"""Options of `from_pretrained` that say where files come from: they hold for configuration and tokenizer too."""

_LOADING_ERRORS = (OSError, ValueError, ImportError, TypeError, AttributeError, LookupError, RecursionError)
_LOADING_ERRORS += (torch.serialization.pickle.UnpicklingError,)  # pickled weights with more than weights in them
"""What transformers raises of files and options that it cannot make a model of."""


def _is_empty(tokenizer: Any) -> bool:
    """Whether a tokenizer has no tokens, as transformers makes one of a folder without a vocabulary."""
    return hasattr(tokenizer, "__len__") and not isinstance(tokenizer, str) and not len(tokenizer)


class BackboneSource:
    """Describes and loads the model of a run.

    Args:
        model: hub id or folder, `PreTrainedModel` or `MultiTaskPeftModel`.
        args: the settings of the run.
        tokenizer: given by the user, or `None`.
        model_init_kwargs: further arguments of `from_pretrained`. The model's own code runs only where they say
            `trust_remote_code=True`; the user is not asked.

    Attributes:
        config: the configuration of the backbone.
        tokenizer: given, or that of the hub id or folder, or `None`.
        quantization: `BitsAndBytesConfig` with which a hub id or folder will be loaded, or `None`.
    """

    def __init__(
        self, model: Any, args: MultiTaskTrainingArguments, tokenizer: Any, model_init_kwargs: Mapping[str, Any]
    ) -> None:
        """Read the configuration, and the tokenizer if none is given."""
        where, given = "model_init_kwargs", model_init_kwargs
        if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
            raise_faults([Fault(where, shown(given), "a dict of options of from_pretrained, by name")])
        trust = given.get("trust_remote_code", False)
        if not isinstance(trust, bool):
            raise_faults([Fault(f"{where}.trust_remote_code", shown(trust), "True or False")])
        self.model = model
        self.args = args
        # `None` makes transformers ask on standard input whether a model's own code may run.
        self.trust_remote_code = trust
        self.model_init_kwargs = {key: value for key, value in model_init_kwargs.items() if key != "trust_remote_code"}
        self.quantization: Any = None
        if _is_empty(tokenizer):
            fix = "Check the files that it was read from."
            raise_faults([Fault("processing_class", "one without tokens", "a tokenizer with a vocabulary", fix)])
        if isinstance(model, str):
            self.config, self.tokenizer = self._read_config(model, tokenizer)
            self.quantization = quantization_of(self.config, model_init_kwargs)
            if self.quantization is not None:
                require_bitsandbytes(self.quantization, args.device)
        else:
            if self.model_init_kwargs or self.trust_remote_code:
                raise ConfigError("model_init_kwargs must be empty for a model that is already loaded.")
            if not hasattr(model, "config"):
                raise ConfigError(
                    "model must be a hub id or folder, a PreTrainedModel, or a MultiTaskPeftModel, got "
                    f"{type(model).__name__}."
                )
            self.config, self.tokenizer = model.config, tokenizer
            prepare_quantized(model.backbone if isinstance(model, MultiTaskPeftModel) else model)
        if self.dtype == torch.float16:
            why = "numbers above 65,504 overflow in it, and losses are not scaled against small gradients"
            fix = "Load it with dtype=torch.bfloat16, or torch.float32 on a CPU."
            warnings.warn(f"model has float16 weights: {why}. {fix}", stacklevel=3)

    def _read_config(self, name: str, tokenizer: Any) -> tuple[Any, Any]:
        from transformers import AutoConfig, AutoTokenizer

        options = {key: self.model_init_kwargs[key] for key in _HUB_OPTIONS if key in self.model_init_kwargs}
        try:
            config = AutoConfig.from_pretrained(name, trust_remote_code=self.trust_remote_code, **options)
        except _LOADING_ERRORS as error:
            # Hub ids have at most one slash.
            is_path = Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
            if is_path and not Path(name).exists():
                raise ConfigError(
                    f'model must be a folder with a config.json, or a hub id, got "{name}", which does not exist. '
                    "Check the path."
                ) from error
            here = [path.parent.name for path in Path.cwd().glob("*/config.json")]
            nearest = "" if "/" in name else closest(name, here)
            text = f"{self._error_text(error)} {nearest}".rstrip()
            raise ConfigError(f'model "{name}" cannot be read: {text}') from error
        if tokenizer is None:
            # Rows that are tokenised already need none; others are refused by name if there is none.
            with suppress(*_LOADING_ERRORS):
                tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=self.trust_remote_code, **options)
            tokenizer = None if _is_empty(tokenizer) else tokenizer
        return config, tokenizer

    def _error_text(self, error: Exception) -> str:
        """Return an error in one line, with how to allow a model's own code to run where that is what it is about."""
        text = " ".join(str(error).split())
        if self.trust_remote_code or "trust_remote_code" not in text:
            return text
        return f'{text} Read that code first; if you trust it, set model_init_kwargs={{"trust_remote_code": True}}.'

    def check(self, tasks: Sequence[ResolvedTask], against: MultiTaskPeftModel | None = None) -> None:
        """Check the adapters of tasks by themselves and, where a model is at hand, against its modules.

        Raises:
            ConfigError: naming every fault of every task.
        """
        faults: list[Fault] = []
        for task in tasks:
            backbone = None if against is None else against.backbone
            faults += config_faults(task.peft_config, f"tasks.{task.name}", backbone)
            # The run smooths labels, but the task's loss has none to smooth; a share of the task's own was checked.
            share = self.args.label_smoothing_factor if task.task.label_smoothing_factor is None else 0.0
            fix = f"Set label_smoothing_factor=0 on the task {task.name}."
            faults += smoothing_faults(
                task.objective, task.loss_args.loss_type, share, "args.label_smoothing_factor", fix
            )
            coefficient = task.router_coefficient(self.config)
            if coefficient and not hasattr(self.config.get_text_config(), "output_router_logits"):
                got = f"{coefficient:g} with the model type {self.config.model_type}"
                allowed = "None or 0, because this model has no routers whose logits it returns"
                faults.append(Fault(f"tasks.{task.name}.router_aux_loss_coef", got, allowed))
        kinds = _head_kinds(tasks)
        if len(kinds) > 1 and TOKEN_CLASSIFICATION in kinds:
            names = ", ".join(task.name for task in tasks if task.head_kind == kinds[0])
            faults.append(
                Fault(
                    "tasks",
                    f"{kinds[0].name} tasks ({names}) and {kinds[1].name} tasks",
                    "of one kind, or language-model and classification tasks",
                    "Train them in two runs.",
                )
            )
        raise_faults(faults)

    def describe(self, tasks: Sequence[ResolvedTask]) -> MultiTaskPeftModel:
        """Return the multi-task model; without weights where they are still to be loaded."""
        if isinstance(self.model, MultiTaskPeftModel):
            model = self.model
            fix = "Rename the task, or give the model without this adapter."
            got = "another one"
            held = [task for task in tasks if task.name in model.tasks]
            raise_faults(
                [
                    Fault(
                        f"tasks.{task.name}.peft_config",
                        got,
                        "the configuration of the model's adapter of this name",
                        fix,
                    )
                    for task in held
                    if not model.registry.was_given(model, task.name, task.peft_config)
                ]
            )
            missing = [task for task in tasks if task.name not in model.tasks]
            if missing:
                model.register_tasks(**adapters_of(missing))
            return assign_settings(model, tasks)
        if isinstance(self.model, str):
            config = self._sized_config(tasks)
            # Quantisation is written into the configuration, from which the weights are still to be loaded.
            config = config if self.quantization is None else copy.deepcopy(config)
            try:
                with torch.device("meta"):
                    backbone = self._auto_class(tasks).from_config(config, trust_remote_code=self.trust_remote_code)
            except _LOADING_ERRORS as error:
                raise ConfigError(f'model "{self.model}" cannot be built: {self._error_text(error)}') from error
            if self.quantization is not None:
                quantize_description(backbone, self.quantization)
            return assign_settings(MultiTaskPeftModel(backbone, **adapters_of(tasks)), tasks)
        # Packing is proven where the model will train: at once if it is already there, otherwise after it is moved.
        verify = None if self.args.device.type == "cuda" else True
        return assign_settings(MultiTaskPeftModel(self.model, **adapters_of(tasks), verify=verify), tasks)

    def load(self, described: MultiTaskPeftModel, tasks: Sequence[ResolvedTask]) -> MultiTaskPeftModel:
        """Return the multi-task model with its weights, possibly still to be verified (`verify_once`)."""
        if not isinstance(self.model, str):
            return described
        options = dict(self.model_init_kwargs)
        options.setdefault("dtype", torch.bfloat16 if self.args.bf16 else "auto")
        if self.quantization is not None:
            options["device_map"] = self.model_init_kwargs.get("device_map", {"": self.args.device})
            if "quantization_config" in self.model_init_kwargs:  # else the format is stored
                options["quantization_config"] = copy.deepcopy(self.quantization)
        config = self._sized_config(tasks)
        try:
            backbone, report = self._auto_class(tasks).from_pretrained(
                self.model,
                config=config,
                output_loading_info=True,
                trust_remote_code=self.trust_remote_code,
                **options,
            )
        except _LOADING_ERRORS as error:
            raise ConfigError(f'the weights of model "{self.model}" cannot be loaded: {error}') from error
        prepare_quantized(backbone)
        is_head_new = any(key.split(".")[0] in HEAD_NAMES for key in report["missing_keys"])
        model = MultiTaskPeftModel(backbone, **adapters_of(tasks), is_head_new=is_head_new, verify=None)
        return assign_settings(model, tasks)

    def folder(self, tasks: Sequence[ResolvedTask]) -> Path | None:
        """Return the folder of safetensors from which a process may read a part of a language model alone.

        Args:
            tasks: the tasks of the run.

        Returns:
            `None` where the model is given as an object, is quantised, or needs options of `from_pretrained`.

        Raises:
            ConfigError: if a hub id cannot be downloaded.
        """
        given_options = {key for key in self.model_init_kwargs if key != "dtype"}
        is_plain = isinstance(self.model, str) and self.quantization is None
        is_plain = is_plain and not given_options and not self.trust_remote_code
        if not is_plain or not all(kind.is_shared for kind in _head_kinds(tasks)):
            return None
        if Path(self.model).is_dir():
            return Path(self.model)
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(self.model, allow_patterns=["*.json", "*.safetensors"]))
        except (OSError, ValueError) as error:
            raise ConfigError(f'the weights of model "{self.model}" cannot be loaded: {error}') from error

    def _auto_class(self, tasks: Sequence[ResolvedTask]) -> Any:
        import transformers

        kind, model_type = _head_kinds(tasks)[-1], getattr(self.config, "model_type", None)
        # A model of images and text whose language head transformers knows among those of images alone.
        if (
            kind.is_shared
            and model_type in modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
            and model_type not in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        ):
            return transformers.AutoModelForImageTextToText
        return getattr(transformers, kind.auto_class)

    def _sized_config(self, tasks: Sequence[ResolvedTask]) -> Any:
        """Return the configuration, with the first task's number of classes for a new head."""
        if tasks[0].num_labels is not None:
            self.config.num_labels = tasks[0].num_labels
        return self.config

    @property
    def dtype(self) -> torch.dtype:
        """In which the backbone's weights are, or will be, held."""
        if not isinstance(self.model, str):
            return self.model.dtype
        wanted = self.model_init_kwargs.get("dtype", torch.bfloat16 if self.args.bf16 else None)
        return wanted if isinstance(wanted, torch.dtype) else getattr(self.config, "dtype", None) or torch.float32


def assign_settings(model: MultiTaskPeftModel, tasks: Iterable[ResolvedTask]) -> MultiTaskPeftModel:
    """Train some tasks of a model each towards its own losses, with its own noise and rates; return the model."""
    for task in tasks:
        model.objectives.assign(task.name, task.objective, task.loss_args)
        model.noise.assign(model.adapter_of(task.name), task.hyper.neftune_noise_alpha)
        coefficient = task.router_coefficient(model.backbone.config)
        model.router_loss.assign(model.adapter_of(task.name), coefficient, model.backbone)
        model.registry.divide_pages(model, task.name, page_kind_of(task.hyper))
    return model


def _head_kinds(tasks: Iterable[ResolvedTask]) -> list[HeadKind]:
    """Return the kinds of head that tasks need, in the order of `HEAD_KINDS`."""
    needed = [task.head_kind for task in tasks]
    return [kind for kind in HEAD_KINDS if kind in needed]
